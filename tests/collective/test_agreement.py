"""Names the difference between two plans, and finds a rank that disagrees, whichever rank comes first."""

from __future__ import annotations

import dataclasses
import threading

import pytest

from npu_bridge.collective.checks.agreement import AgreementChecks, AllReducePlan, PlannedGradient, RanksDisagreeError
from npu_bridge.collective.rendezvous.key_value_store import ADDRESS_VARIABLE, PORT_VARIABLE

DENSE, SPARSE = "a dense gradient", "a sparse gradient"
KERNEL = PlannedGradient("dense/kernel:0", "(3, 4)", DENSE, "float32")
BIAS = PlannedGradient("dense/bias:0", "(4,)", DENSE, "float32")
ROWS = PlannedGradient("embedding:0", "(20, 4)", SPARSE, "float32")
PLAN = AllReducePlan("Adam", [KERNEL, BIAS, ROWS], [[1], [0]], {"loss_scale_manager": "Fixed", "loss_scale": 1024.0})


def difference(reference, plan):
    return plan.difference_from(reference)


def changed(**parts):
    return dataclasses.replace(PLAN, **parts)


def named(*names):
    """A plan for variables of one shape whose names Keras has made unique."""
    gradients = [KERNEL._replace(name=name) for name in names]
    return AllReducePlan("Adam", gradients, [list(range(len(names)))], has_numbered_names=True)


# Others are in ranks/test_agreement.py.
@pytest.mark.parametrize(
    ("plan", "expected", "got"),
    [
        (changed(settings={}), "loss_scale_manager=Fixed", "no loss_scale_manager"),
        (changed(settings={**PLAN.settings, "wire": "float16"}), "no wire", "wire=float16"),
        (changed(fragments=[[0], [1]]), "dense/bias:0 at position 0", "dense/kernel:0"),
    ],
)
def test_the_first_difference_is_named_with_both_sides(plan, expected, got):
    found = difference(PLAN, plan)
    assert (found.expected, found.got) == (expected, got)
    assert "every rank" in found.fix


def test_numbers_that_keras_gives_to_names_may_differ():
    names = ("dense_9/kernel:0", "dense_10/kernel:0", "dense_11/kernel:0")
    ours = named("dense/kernel:0", "dense_1/kernel:0", "dense_2/kernel:0")
    assert difference(ours, named(*names)) is None
    assert difference(named(*names), ours) is None
    # In a graph a name is what the script says.
    of_graphs = [dataclasses.replace(plan, has_numbered_names=False) for plan in (ours, named(*names))]
    assert difference(*of_graphs) is not None


@pytest.mark.parametrize(
    "names",
    [
        ("layer_1/kernel:0", "layer_0/kernel:0"),
        ("layer_0/kernel:0", "other/kernel:0"),
    ],
)
def test_another_order_or_another_variable_is_no_matter_of_numbers(names):
    ours = named("layer_0/kernel:0", "layer_1/kernel:0")
    assert difference(ours, named(*names)) is not None
    assert difference(named(*names), ours) is not None


def test_a_scope_around_the_whole_model_may_have_another_name_but_not_one_inside():
    def inside(*scopes):
        return changed(gradients=[KERNEL._replace(name=f"{scope}/kernel:0") for scope in scopes], fragments=[])

    assert difference(inside("rank_0/a", "rank_0/b"), inside("rank_1/a", "rank_1/b")) is None
    assert difference(inside("rank_0/a", "rank_0/b"), inside("rank_1/deep/a", "rank_1/deep/b")) is None
    found = difference(inside("rank_0/a", "rank_0/b"), inside("rank_1/a", "rank_1/c"))
    assert found.expected == "the variable rank_0/b/kernel:0 of shape (3, 4)"


@pytest.fixture
def board(monkeypatch):
    """The server of a job: the one Horovod's launcher runs."""
    http_server = pytest.importorskip("horovod.runner.http.http_server")
    server = http_server.RendezvousServer()
    port = server.start()
    monkeypatch.setenv(ADDRESS_VARIABLE, "127.0.0.1")
    monkeypatch.setenv(PORT_VARIABLE, str(port))
    yield server
    server.stop()


WRONG = changed(gradients=[KERNEL._replace(shape="(3, 5)"), BIAS, ROWS])


@pytest.mark.parametrize("first", [0, 1])
def test_the_second_to_post_finds_out_and_both_read_the_same_sentence(board, first):
    plans = {0: PLAN, 1: WRONG}
    AgreementChecks().check(plans[first], first, 2)
    with pytest.raises(RanksDisagreeError) as caught:
        AgreementChecks().check(plans[1 - first], 1 - first, 2)
    assert str(caught.value) == (
        "Adam: rank 1 and rank 0 would reduce different gradients. Expected the shape (3, 4) of dense/kernel:0 as on "
        "rank 0; got (3, 5). Build the same model on every rank."
    )


def test_ranks_that_post_at_the_same_time_never_miss_each_other(board):
    ranks = {0: AgreementChecks(), 1: AgreementChecks()}
    for _ in range(30):
        found, start = [], threading.Barrier(2)

        def post(rank, plan, found=found, start=start):
            start.wait()
            try:
                ranks[rank].check(plan, rank, 2)
            except RanksDisagreeError as error:
                found.append(error)

        threads = [threading.Thread(target=post, args=pair) for pair in ((0, PLAN), (1, WRONG))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found


def test_rank_0_looks_at_every_other_rank_and_only_at_plans_of_the_same_number(board):
    ranks = [AgreementChecks() for _ in range(4)]
    for rank in (1, 2, 3):
        ranks[rank].check(PLAN, rank, 4)
    ranks[0].check(PLAN, 0, 4)
    ranks[1].check(PLAN, 1, 4)
    ranks[2].check(PLAN, 2, 4)
    ranks[3].check(WRONG, 3, 4)  # number 1, which rank 0 has not posted yet
    with pytest.raises(RanksDisagreeError, match="rank 3 and rank 0"):
        ranks[0].check(PLAN, 0, 4)


def _call_model_fn(agreements, mode):  # as an Estimator calls it
    agreements.check(WRONG, 0, 2)


def test_what_only_one_rank_builds_does_not_count_when_it_is_of_another_name_or_trains_nothing(board):
    ranks = {0: AgreementChecks(), 1: AgreementChecks()}
    ranks[0].check(changed(owner="only here/ü"), 0, 2)
    _call_model_fn(ranks[0], "eval")
    ranks[0].check(PLAN, 0, 2)
    ranks[1].check(PLAN, 1, 2)
    ranks[1].check(WRONG, 1, 2)
    with pytest.raises(RanksDisagreeError):
        ranks[0].check(PLAN, 0, 2)


def test_without_a_board_nothing_is_compared(monkeypatch):
    monkeypatch.delenv(ADDRESS_VARIABLE, raising=False)
    AgreementChecks().check(PLAN, 0, 2)


def test_a_board_that_is_gone_and_a_job_whose_ranks_change_are_no_errors(board, monkeypatch):
    AgreementChecks().check(PLAN, 0, 2)
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    AgreementChecks().check(WRONG, 1, 2)
    monkeypatch.delenv("HOROVOD_ELASTIC")
    monkeypatch.setenv(PORT_VARIABLE, "1")
    AgreementChecks().check(WRONG, 1, 2)
