"""Trainings resume from each other's checkpoints, with any number of ranks and any set of stages."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from npu_bridge import collective
from tests.goldens.sets import SETS, assert_settled, kinds_of, training
from tests.once import lines_said

STOP, END = 4, 8  # inside a window of three
# On one rank most stages do nothing, and four ranks on two cores are slow: there, the sets in which most is kept.
OF_ONE = ("plain", "window", "freeze", "top k", "partial sync", "dynamic scale", "sharded", "fused LAMB")
OF_FOUR = ("plain", "window", "top k", "partial sync", "adasum of weights", "sharded", "fused LAMB")
SETS_OF = {1: OF_ONE, 2: tuple(SETS), 4: OF_FOUR}
# Every stage is added to a running training, and removed from one; and what is kept for each rank changes its kind.
_ADDED = [pair for name in SETS if name != "plain" for pair in (("plain", name), (name, "plain"))]
_ODD = ("window", "partial sync", "window, top k, dynamic, adam")
CHANGES = [*_ADDED, *itertools.permutations(_ODD, 2), ("window", "window of reduced"), ("window of reduced", "window")]


def _path(folder, chosen, ranks):
    # Each job has a folder of its own: the ranks that stay up hold what they have saved to.
    return f"{folder}/{ranks}/{chosen.replace(' ', '_').replace(',', '')}_{ranks}"


def trained_and_resumed(chosen_sets, folder):
    """On a rank: by set, the state in the middle, and at the end without a save, after a save, and after a restore."""
    ranks, found = collective.current(), {}
    for chosen in chosen_sets:
        made, path = training(chosen), _path(folder, chosen, ranks.size)
        ends = []
        with made.session() as session:
            made.train(session, 0, END)
            ends.append(made.state(session))
        with made.session() as session:
            made.train(session, 0, STOP)
            middle = made.state(session)
            made.save(session, path)
            made.train(session, STOP, END)
            ends.append(made.state(session))
        with made.session() as session, lines_said() as lines:
            if chosen.startswith("sharded") or ranks.rank == 0:  # else rank 0 alone has the file
                made.restore(session, path)
            made.train(session, STOP, END)
            ends.append(made.state(session))
        found[chosen] = middle, ends, lines
    return found


def gone_on(pairs, folder, saving_ranks):
    """Returns on a rank, by pair of sets: state after a restore of the first one's checkpoint, the log, one step."""
    found = {}
    for before, after in pairs:
        made = training(after)
        with made.session() as session, lines_said() as lines:
            initial = made.state(session)
            made.restore(session, _path(folder, before, saving_ranks))
            made.settle(session)
            restored = made.state(session)
            made.train(session, STOP, STOP + 1)
            found[before, after] = restored, initial, list(lines), made.state(session)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("matrix")
    for count in (1, 2, 4):
        (folder / str(count)).mkdir()
    return str(folder)


@pytest.fixture(scope="module")
def saved(rank_pools, folder):
    """By number of ranks, what `trained_and_resumed` gave on them; the checkpoints are in `folder`."""
    return {
        count: rank_pools.run(count, trained_and_resumed, SETS_OF[count], folder, time_limit_secs=600)
        for count in (1, 2, 4)
    }


def _assert_same(state, other, where):
    assert set(state) == set(other), where
    for name, value in state.items():
        assert np.array_equal(value, other[name]), f"{where}: {name} is {other[name]} instead of {value}"


@pytest.mark.slow("all stages in all ways to train; test_sync_before_saving.py has one")
def test_the_same_ranks_and_stages_go_on_bit_for_bit(saved):
    pairs = 0
    for count, of_ranks in saved.items():
        for chosen in of_ranks[0]:
            pairs += 1
            for rank, found in enumerate(of_ranks):
                _, (whole, after_save, resumed), lines = found[chosen]
                where = f"{chosen}, rank {rank} of {count}"
                _assert_same(whole, after_save, f"{where}, saved in the middle")
                _assert_same(whole, resumed, f"{where}, resumed")
                assert not lines, f"{where}: {lines}"
    assert pairs == len(OF_ONE) + len(SETS) + len(OF_FOUR)


@pytest.mark.slow("resumes from the trainings of all stages")
def test_another_number_of_ranks_goes_on_with_the_same_state(on_ranks, saved, folder):
    pairs = 0
    for saving, going_on in itertools.permutations((1, 2, 4), 2):
        sets = [chosen for chosen in SETS_OF[saving] if chosen in SETS_OF[going_on]]
        results = on_ranks(going_on, gone_on, [(chosen, chosen) for chosen in sets], folder, saving)
        for chosen in sets:
            pairs += 1
            where = f"{chosen}, {saving} ranks to {going_on}"
            states = [result[chosen, chosen][0] for result in results]
            of_savers = [found[chosen][0] for found in saved[saving]]
            assert_settled(states, of_savers, chosen, where)
            _assert_told(of_savers, results, (chosen, chosen), saving, where)
    assert pairs == 2 * len(OF_ONE) + 2 * len(OF_FOUR) + 2 * len({*OF_ONE} & {*OF_FOUR})


@pytest.mark.slow("resumes from the trainings of all stages")
def test_stages_come_and_go(on_ranks, saved, folder):
    results = on_ranks(2, gone_on, CHANGES, folder, 2)
    for before, after in CHANGES:
        where = f"{before} to {after}"
        of_savers = [found[before][0] for found in saved[2]]
        states = [result[before, after][0] for result in results]
        assert_settled(states, of_savers, after, where)
        for result in results:
            restored, initial, _, trained = result[before, after]
            for name in set(restored) - {name for state in of_savers for name in state}:
                assert np.array_equal(restored[name], initial[name]), f"{where}: {name} does not begin anew"
            assert all(np.isfinite(value).all() for value in trained.values()), where
        _assert_told(of_savers, results, (before, after), 2, where)
    assert len(CHANGES) >= 40


def _assert_told(of_savers, results, pair, saving, where):
    """Rank 0 says in a line each what begins, what is dropped and what is merged; others say nothing."""
    states, (lines, *of_others) = [result[pair][0] for result in results], [result[pair][2] for result in results]
    assert not any(of_others), where
    before = {name for state in of_savers for name in state}
    after = {name for state in states for name in state}
    of_lines = {word: [line for line in lines if f": {word}" in line] for word in ("missing", "dropped", "merged")}
    assert all(len(found) <= 1 for found in of_lines.values()), f"{where}: {lines}"
    for word, names in (("missing", after - before), ("dropped", before - after)):
        assert bool(of_lines[word]) == bool(names), f"{where}: {lines}, {sorted(names)}"
        for kind in kinds_of(dict.fromkeys(names)):
            assert kind in of_lines[word][0], f"{where}: {lines}"
    of_all = set.intersection(*map(set, [*of_savers, *states]))
    own = [name for name in of_all if any((of_savers[0][name] != state[name]).any() for state in of_savers)]
    is_merged = any((states[0][name] != of_savers[0][name]).any() for name in own)
    assert bool(of_lines["merged"]) == is_merged, f"{where}: {lines}, {own}"
    if is_merged:
        assert f"merged from {saving} ranks for {len(results)}" in of_lines["merged"][0]
