"""The documented collectives and group functions: names, signatures, and what they refuse, with one process."""

from __future__ import annotations

import inspect
import json
import logging

import numpy as np
import pytest
import tensorflow as tf

from hccl.manage import api as manage
from hccl.split import api as split
from npu_bridge.collective import groups
from npu_bridge.estimator.npu import npu_optimizer
from npu_bridge.hccl import hccl_ops
from tests.documented.signatures import signature_of
from tests.refusing import refuses

WORLD = "hccl_world_group"
SIGNATURES = {
    hccl_ops.allreduce: "(tensor, reduction, fusion=1, fusion_id=-1, group=W)",
    hccl_ops.allgather: "(tensor, rank_size, group=W, fusion=0, fusion_id=-1)",
    hccl_ops.broadcast: "(tensor, root_rank, fusion=2, fusion_id=0, group=W)",
    hccl_ops.reduce: "(tensor, reduction, root_rank, fusion=0, fusion_id=-1, group=W)",
    hccl_ops.reduce_scatter: "(tensor, reduction, rank_size, group=W, fusion=0, fusion_id=-1)",
    hccl_ops.send: "(tensor, sr_tag, dest_rank, group=W)",
    hccl_ops.receive: "(shape, data_type, sr_tag, src_rank, group=W)",
    hccl_ops.all_to_all_v: ("(send_data, send_counts, send_displacements, recv_counts, recv_displacements, group=W)"),
    hccl_ops.all_to_all_v_c: "(send_data, send_count_matrix, rank, fusion=0, fusion_id=-1, group=W)",
    hccl_ops.gather_all_to_all_v: (
        "(addrinfo, addrinfo_count_per_rank, recv_counts, recv_displacements, dtype, addr_length, group=W)"
    ),
    hccl_ops.remote_read: "(tensorRemote, data_type)",
    hccl_ops.remote_ref_read: "(tensorRemote, cache, offset)",
    hccl_ops.remote_write: "(tensorRemote, tensorLocal, data_type)",
    hccl_ops.remote_scatter_write: "(tensorRemote, tensorLocal, offset)",
    manage.create_group: "(group, rank_num, rank_ids)",
    manage.create_group_of_others: "()",
    manage.destroy_group: "(group)",
    manage.get_rank_size: "(group=W)",
    manage.get_rank_id: "(group=W)",
    manage.get_local_rank_size: "(group=W)",
    manage.get_local_rank_id: "(group=W)",
    manage.get_world_rank_from_group_rank: "(group, group_rank_id)",
    manage.get_group_rank_from_world_rank: "(world_rank_id, group)",
    split.set_split_strategy_by_idx: "(idxList, group=W)",
    split.set_split_strategy_by_size: "(dataSizeList, group=W)",
    npu_optimizer.allreduce: "(tensor, average=True)",
    npu_optimizer.reduce: "(tensor, root_rank, average=True, fusion=0, fusion_id=-1)",
    npu_optimizer.npu_allreduce: "(values, reduction='mean', fusion=1, fusion_id=-1, group=W)",
}
X = [1.0, 2.0]


@pytest.fixture(autouse=True)
def fresh_groups():
    """No group or strategy outlives a test."""
    groups.groups_of_process.cache_clear()
    yield
    groups.groups_of_process.cache_clear()


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: f"{function.__module__}.{function.__name__}")
def test_signature(function):
    assert signature_of(function).replace(repr(WORLD), "W") == SIGNATURES[function]


@pytest.mark.parametrize("module", [hccl_ops, manage, split])
def test_everything_public_is_listed(module):
    public = {
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    }
    assert public <= set(module.__all__)


def test_the_titles_of_the_documentation_are_names_too():
    assert hccl_ops.alltoallv is hccl_ops.all_to_all_v
    assert hccl_ops.alltoallvc is hccl_ops.all_to_all_v_c


def test_one_process_gets_back_what_it_gives():
    np.testing.assert_array_equal(hccl_ops.allreduce(X, "prod"), X)
    np.testing.assert_array_equal(hccl_ops.reduce(X, "sum", 0), X)
    np.testing.assert_array_equal(hccl_ops.allgather(X, 1), X)
    np.testing.assert_array_equal(hccl_ops.reduce_scatter(X, "max", 1), X)
    np.testing.assert_array_equal(hccl_ops.broadcast([X, [3]], 0)[1], [3])
    np.testing.assert_array_equal(hccl_ops.all_to_all_v([1, 2, 3], [2], [1], [2], [2]), [0, 0, 2, 3])
    np.testing.assert_array_equal(hccl_ops.all_to_all_v_c([1, 2, 3], [[2]], 0), [1, 2])
    np.testing.assert_array_equal(hccl_ops.all_to_all_v_c([1, 2, 3], hccl_ops.allgather([2], 1), 0), [1, 2])
    np.testing.assert_array_equal(npu_optimizer.npu_allreduce([tf.constant(X)])[0], X)
    np.testing.assert_array_equal(npu_optimizer.allreduce(tf.constant([7])), [7])


def test_results_have_static_shapes_in_a_graph(graph):
    x = tf.compat.v1.placeholder(tf.float32, [None, 3])
    assert hccl_ops.allgather(x, 1).shape.as_list() == [None, 3]
    assert hccl_ops.reduce_scatter(x, "sum", 1).shape.as_list() == [None, 3]
    assert hccl_ops.broadcast([x], 0)[0].op is not None


def test_a_broadcast_without_fusion_takes_its_own_default_for_the_id():
    assert hccl_ops.broadcast([X], 0, fusion=0)[0].numpy().tolist() == list(X)


def test_the_smallest_and_the_largest_fusion_id_are_taken():
    for fusion_id in (0, 2**31 - 1):
        assert hccl_ops.allreduce(X, "sum", fusion=2, fusion_id=fusion_id).numpy().tolist() == list(X)


@refuses(
    (lambda: hccl_ops.allreduce(X, "summ"), ValueError, "Did you mean 'sum'?"),
    (lambda: hccl_ops.allreduce([True], "sum"), TypeError, "got bool of shape (1,)"),
    (lambda: hccl_ops.allreduce(tf.IndexedSlices([X], [0]), "sum"), TypeError, "not dense"),
    (lambda: hccl_ops.allreduce(X, "sum", fusion=3), ValueError, "fusion in [0, 1, 2]; got 3"),
    (lambda: hccl_ops.allreduce(X, "sum", fusion=2), ValueError, "0 to 2147483647; got -1"),
    (lambda: hccl_ops.allreduce(X, "sum", 2, 2**31), ValueError, "fusion_id does not fit"),
    (lambda: hccl_ops.allreduce(X, "sum", fusion_id=1), ValueError, "Expected -1; got 1"),
    (lambda: hccl_ops.allreduce(X, "sum", group="other"), ValueError, "no group 'other'"),
    (lambda: hccl_ops.allreduce(X, "sum", group=""), ValueError, "1 to 127 characters"),
    (lambda: hccl_ops.reduce(X, "sum", 1), ValueError, "from 0 to 0; got 1"),
    (lambda: hccl_ops.allgather(X, 2), ValueError, "rank_size=1; got 2"),
    (lambda: hccl_ops.allgather(1.0, 1), ValueError, "a scalar has no first dimension"),
    (lambda: hccl_ops.broadcast(tf.constant(X), 0), TypeError, "not a list"),
    (lambda: hccl_ops.broadcast([X], -1), ValueError, "got -1"),
    (lambda: hccl_ops.broadcast([X], 0, 0, 1), ValueError, "Expected -1; got 1"),
    (lambda: hccl_ops.all_to_all_v(X, [1, 1], [0], [1], [0]), ValueError, "send_counts does not have one entry"),
    (lambda: hccl_ops.all_to_all_v(X, [-1], [0], [1], [0]), ValueError, "negative entry"),
    (lambda: hccl_ops.all_to_all_v(X, [2], [1], [2], [0]), ValueError, "the 2 elements of send_data; got [3]"),
    (lambda: hccl_ops.all_to_all_v_c([1, 2, 3], [[6]], 0), ValueError, "the 3 elements of send_data; got [6]"),
    (lambda: hccl_ops.all_to_all_v_c(X, [[1, 1]], 0), ValueError, "shape (1, 1); got shape (1, 2)"),
    (lambda: hccl_ops.all_to_all_v_c(X, [[1]], 1), ValueError, "rank=0; got 1"),
    (lambda: hccl_ops.send(X, 0, 0), ValueError, "this rank itself"),
    (lambda: hccl_ops.send(X, "tag", 0), ValueError, "sr_tag"),
    (lambda: hccl_ops.receive([None], tf.float32, 0, 0), ValueError, "shape is not fully known"),
    (lambda: npu_optimizer.npu_allreduce(tf.constant(X), "avg"), ValueError, "'mean', 'sum', 'max'"),
    (lambda: npu_optimizer.npu_allreduce([tf.constant(X), None]), ValueError, "got None at positions [1]"),
    (lambda: npu_optimizer.reduce(tf.constant(X), 3), ValueError, "root_rank is not a rank"),
    (lambda: manage.create_group(None, 1, [0]), ValueError, "got None"),
    (lambda: manage.create_group(7, 1, [0]), ValueError, "got 7"),
    (lambda: manage.create_group("x" * 128, 1, [0]), ValueError, "1 to 127 characters"),
    (lambda: manage.create_group("g", 0, []), ValueError, "rank_num"),
    (lambda: manage.create_group("g", 1, (0,)), ValueError, "rank_ids is not a list"),
    (lambda: manage.create_group("g", 2, [0]), ValueError, "2 non-negative integers; got [0]"),
    (lambda: manage.create_group("g", 2, [0, 0]), ValueError, "different integers"),
    (lambda: manage.create_group("g", 1, [1]), ValueError, "from 0 to 0; got [1]"),
    (lambda: manage.create_group(WORLD, 1, [0]), ValueError, "already has a group"),
    (lambda: manage.destroy_group("g"), ValueError, "no group 'g'"),
    (lambda: manage.destroy_group(WORLD), ValueError, "cannot be destroyed"),
    (lambda: manage.get_rank_size("g"), ValueError, "get_rank_size: there is no group 'g'"),
    (lambda: manage.get_world_rank_from_group_rank(WORLD, 1), ValueError, "from 0 to 0; got 1"),
    (lambda: manage.get_group_rank_from_world_rank(2, WORLD), ValueError, "one of [0]; got 2"),
    (lambda: split.set_split_strategy_by_idx([]), ValueError, "at least one number"),
    (lambda: split.set_split_strategy_by_idx((1, 2)), ValueError, "not a list"),
    (lambda: split.set_split_strategy_by_idx([1, 1]), ValueError, "does not ascend"),
    (lambda: split.set_split_strategy_by_idx([-1]), ValueError, "from 0 to 4294967295"),
    (lambda: split.set_split_strategy_by_idx([1.5]), ValueError, "integers"),
    (lambda: split.set_split_strategy_by_size([50, 49]), ValueError, "a sum of 100; got 99"),
    (lambda: split.set_split_strategy_by_size([float("nan"), 100]), ValueError, "percentages"),
    (lambda: split.set_split_strategy_by_size([110, -10]), ValueError, "numbers of at least 0"),
)
def test_wrong_arguments_are_refused_with_what_was_given(call):
    call()


def test_messages_name_the_op_the_rank_and_the_shape():
    with tf.Graph().as_default(), pytest.raises(TypeError) as caught:
        hccl_ops.allreduce(tf.constant(["a", "b"]), "sum")
    assert str(caught.value).startswith("hccl_ops.allreduce (rank 0 of 1 in 'hccl_world_group'): tensor has a dtype")
    assert "string of shape (2,)" in str(caught.value)


@pytest.mark.parametrize(
    "name", ["gather_all_to_all_v", "remote_read", "remote_ref_read", "remote_write", "remote_scatter_write"]
)
def test_access_by_device_address_is_not_there_and_names_an_alternative(name):
    function = getattr(hccl_ops, name)
    required = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    with pytest.raises(NotImplementedError, match=rf"hccl_ops\.{name}: .* [Cc]all "):
        function(*[None] * len(required))


def test_groups_of_one_process():
    manage.create_group("mine", 1, [0])
    assert (manage.get_rank_size("mine"), manage.get_rank_id("mine")) == (1, 0)
    assert (manage.get_local_rank_size("mine"), manage.get_local_rank_id("mine")) == (1, 0)
    assert manage.get_world_rank_from_group_rank("mine", 0) == 0
    assert manage.get_group_rank_from_world_rank(0, "mine") == 0
    assert hccl_ops.allreduce(X, "sum", group="mine").shape == (2,)
    manage.create_group_of_others()
    with pytest.raises(ValueError, match="already has a group"):
        manage.create_group("mine", 1, [0])
    manage.destroy_group("mine")
    manage.create_group("mine", 1, [0])


def test_a_second_split_is_ignored_with_a_warning(caplog):
    split.set_split_strategy_by_idx(list(np.cumsum([4, 6, 2]) - 1))
    with caplog.at_level(logging.WARNING):
        split.set_split_strategy_by_idx([5])
    assert "is ignored" in caplog.text
    strategy = groups.groups_of_process().strategies.strategy_of(WORLD)
    assert json.dumps(strategy.last_indices) == "[3, 9, 11]"  # ranks compare plans as JSON
    split.set_split_strategy_by_size(list(np.array([90.0, 10.0])))
    assert groups.groups_of_process().strategies.strategy_of(WORLD).percentages == (90, 10)


def test_more_than_eight_fragments_are_taken_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        split.set_split_strategy_by_size([10] * 10)
    assert "10 fragments" in caplog.text
    assert len(groups.groups_of_process().strategies.strategy_of(WORLD).percentages) == 10
