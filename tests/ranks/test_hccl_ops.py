"""Every collective, dtype and number of ranks against numpy, with real ranks."""

from __future__ import annotations

import contextlib
import functools

import numpy as np
import pytest
import tensorflow as tf

from hccl.manage import api
from npu_bridge.collective import current
from npu_bridge.collective.engines.communicator import REDUCTIONS
from npu_bridge.estimator.npu import npu_optimizer
from npu_bridge.estimator.npu.npu_optimizer import NPUDistributedOptimizer, npu_allreduce
from npu_bridge.graph.control_flow import classic_control_flow
from npu_bridge.hccl import checks, hccl_ops
from tests.goldens.two_layers import in_graph
from tests.gradients.test_gradients_of_bodies import BODIES, train
from tests.rank_pool import on_each_rank
from tests.ranks.ways import started_session

SIZES = (4, 3, 2, 1)
NUMPY = {
    "sum": functools.partial(np.sum, axis=0),
    "max": functools.partial(np.max, axis=0),
    "min": functools.partial(np.min, axis=0),
    "prod": functools.partial(np.prod, axis=0),
}


def numbers(rank, dtype, shape):
    """Returns a rank's input: whole numbers, so that every dtype holds every result exactly."""
    low = 0 if dtype.is_unsigned or dtype == tf.bool else -3
    values = np.random.default_rng([rank, len(dtype.name)]).integers(low, 4, size=shape)
    return values.astype(dtype.as_numpy_dtype)


def counts_of(size):
    """How many elements each rank (row) sends to each rank (column); some send nothing."""
    return np.random.default_rng(size).integers(0, 4, size=(size, size))


def send_starts(rank, size):
    return np.random.default_rng([rank, size]).integers(0, 9, size=size)


def receive_starts(rank, size):
    """Blocks that arrive lie backwards, with one element between them."""
    lengths = counts_of(size)[:, rank] + 1
    return np.cumsum(lengths[::-1])[::-1] - lengths


def every_collective():
    """Builds all combinations in one TF 1 graph and runs them at once."""
    ranks = current()
    rank, size = ranks.rank, ranks.size
    with tf.Graph().as_default():
        fetches = {}
        for dtype in checks.REDUCIBLE:
            tensor = tf.constant(numbers(rank, dtype, (2 * size, 3)), dtype)
            scalar = tf.constant(numbers(rank, dtype, ()), dtype)
            for reduction in REDUCTIONS:
                key = (dtype.name, reduction)
                fetches[("allreduce", *key)] = hccl_ops.allreduce(tensor, reduction)
                fetches[("allreduce scalar", *key)] = hccl_ops.allreduce(scalar, reduction, fusion=0)
                fetches[("reduce", *key)] = hccl_ops.reduce(tensor, reduction, size - 1, fusion=2, fusion_id=7)
                fetches[("reduce_scatter", *key)] = hccl_ops.reduce_scatter(tensor, reduction, size)
        for dtype in checks.MOVABLE:
            tensor = tf.constant(numbers(rank, dtype, (2, 3)), dtype)
            data = tf.constant(numbers(rank, dtype, (4, 3)), dtype)
            counts = counts_of(size)
            fetches["allgather", dtype.name] = hccl_ops.allgather(tensor, size)
            fetches["all_to_all_v", dtype.name] = hccl_ops.all_to_all_v(
                data, counts[rank], send_starts(rank, size), counts[:, rank], receive_starts(rank, size)
            )
            matrix = counts if dtype.is_integer else counts.ravel()  # or its rows, as an allgather gives them
            fetches["all_to_all_v_c", dtype.name] = hccl_ops.all_to_all_v_c(
                tf.constant(numbers(rank, dtype, (4 * size,)), dtype), tf.constant(matrix), rank
            )
        tensors = [tf.constant(numbers(rank, dtype, (2, 3)), dtype) for dtype in checks.BROADCASTABLE]
        for dtype, sent in zip(checks.BROADCASTABLE, hccl_ops.broadcast(tensors, size - 1)):
            fetches["broadcast", dtype.name] = sent
        with tf.compat.v1.Session() as session:
            values = session.run(fetches)
    return {key: (fetches[key].dtype.name, value.astype(np.complex128)) for key, value in values.items()}


def expected_results(rank, size):
    """Yields the expected results of one rank, computed in numpy."""
    for dtype in checks.REDUCIBLE:
        tensors = [numbers(other, dtype, (2 * size, 3)) for other in range(size)]
        scalars = [numbers(other, dtype, ()) for other in range(size)]
        for reduction, combine in NUMPY.items():
            key = (dtype.name, reduction)
            combined = combine(np.stack(tensors).astype(np.float64))
            yield ("allreduce", *key), combined
            yield ("allreduce scalar", *key), combine(np.stack(scalars).astype(np.float64))
            yield ("reduce", *key), combined
            yield ("reduce_scatter", *key), combined[2 * rank : 2 * rank + 2]
    counts = counts_of(size)
    for dtype in checks.MOVABLE:
        yield ("allgather", dtype.name), np.concatenate([numbers(other, dtype, (2, 3)) for other in range(size)])
        placed = np.zeros(max(counts[:, rank] + receive_starts(rank, size)))
        blocks = []
        for other in range(size):
            count, start = counts[other, rank], send_starts(other, size)[rank]
            target = receive_starts(rank, size)[other]
            placed[target : target + count] = numbers(other, dtype, (4, 3)).reshape(-1)[start : start + count]
            start = counts[other, :rank].sum()
            blocks.append(numbers(other, dtype, (4 * size,))[start : start + count])
        yield ("all_to_all_v", dtype.name), placed
        yield ("all_to_all_v_c", dtype.name), np.concatenate(blocks)
    for dtype in checks.BROADCASTABLE:
        yield ("broadcast", dtype.name), numbers(size - 1, dtype, (2, 3))


def run(on_ranks, size, function, *arguments):
    """One rank needs no launcher."""
    return [function(*arguments)] if size == 1 else on_ranks(size, function, *arguments)


@pytest.mark.few_fast(["2"], "other numbers of ranks take the same way")
@pytest.mark.parametrize("size", SIZES)
def test_every_collective_and_dtype_agrees_with_numpy(on_ranks, size):
    for rank, results in enumerate(run(on_ranks, size, every_collective)):
        expected = dict(expected_results(rank, size))
        assert set(results) == set(expected)
        for key, (dtype_name, value) in results.items():
            assert dtype_name == key[1]
            np.testing.assert_array_equal(
                value, np.asarray(expected[key]).astype(np.complex128), err_msg=f"{key} on rank {rank} of {size}"
            )


@on_each_rank(2)
@in_graph
def test_large_sums_blocks_of_any_length_and_rows_that_do_not_divide():
    rank = current().rank
    large = tf.constant([1e10, 2e10], tf.bfloat16)
    counts = np.array([[1, 2], [3, 4]])
    data = tf.fill([int(counts[rank].sum())], float(rank))
    starts = [np.concatenate([[0], row[:1]]) for row in (counts[rank], counts[:, rank])]
    fetches = {
        "allreduce": hccl_ops.allreduce(large, "sum"),
        "reduce_scatter": hccl_ops.reduce_scatter(large, "sum", 2),
        "all_to_all_v": hccl_ops.all_to_all_v(data, counts[rank], starts[0], counts[:, rank], starts[1]),
        "all_to_all_v_c": hccl_ops.all_to_all_v_c(data, tf.constant(counts), rank),
    }
    rows = tf.compat.v1.placeholder(tf.float32, [None] if rank else None)
    scattered = hccl_ops.reduce_scatter(rows, "sum", 2)
    assert hccl_ops.allgather(rows, 2).shape.rank == (1 if rank else None)
    with tf.compat.v1.Session() as session:
        results = {name: value.astype(float).tolist() for name, value in session.run(fetches).items()}
        with pytest.raises(tf.errors.InvalidArgumentError, match="the first dimension must be a multiple of 2"):
            session.run(scattered, {rows: [1.0, 2.0, 3.0]})
    np.testing.assert_allclose(results["allreduce"], [2e10, 4e10], rtol=0.01)
    np.testing.assert_allclose(results["reduce_scatter"], [[2e10], [4e10]][rank], rtol=0.01)
    blocks = [[0.0] + [1.0] * 3, [0.0] * 2 + [1.0] * 4][rank]
    assert results["all_to_all_v"] == results["all_to_all_v_c"] == blocks


@on_each_rank(2, gives=[2.0, 3.0])
def test_transfers_of_the_same_tensor_are_not_merged():
    """One rank reduces one tensor twice, the other two tensors."""
    with tf.Graph().as_default():
        values = [tf.compat.v1.get_variable(f"v{number}", initializer=1.0 + number) for number in range(2)]
        given = [values[0]] * 2 if current().rank == 0 else values
        totals = [hccl_ops.allreduce(value, "sum") for value in given]
        with started_session() as session:
            return session.run(totals)


@on_each_rank(2)
def test_the_gradient_of_a_sum_is_the_sum_of_the_gradients():
    ranks = current()
    weight = tf.constant([1.0 + ranks.rank, 10.0])
    x = tf.Variable([2.0, 3.0])
    with tf.GradientTape() as outer:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(hccl_ops.allreduce(x * x, "sum") * weight)
        eager = tape.gradient(loss, x)
        total = tf.reduce_sum(eager)
    second = outer.gradient(total, x)
    with tf.Graph().as_default():
        v = tf.compat.v1.get_variable("v", initializer=[2.0, 3.0])
        loss = tf.reduce_sum(hccl_ops.allreduce(v * v, "sum") * tf.constant(weight.numpy()))
        grad = tf.compat.v1.gradients(loss, v)[0]
        with tf.compat.v1.Session() as session:
            session.run(v.initializer)
            graph = session.run(grad)
    np.testing.assert_array_equal(eager, [3.0 * 4.0, 20.0 * 6.0])
    np.testing.assert_array_equal(graph, eager)
    np.testing.assert_array_equal(second, [6.0, 40.0])


@pytest.mark.parametrize(
    "collective",
    [
        lambda x: hccl_ops.allreduce(x, "max"),
        lambda x: hccl_ops.reduce(x, "sum", 0),
        lambda x: hccl_ops.allgather(x, 1),
        lambda x: hccl_ops.broadcast([x * 1.0], 0)[0],
        lambda x: hccl_ops.broadcast([x], 0)[0],
        lambda x: hccl_ops.reduce_scatter(x, "sum", 1),
        lambda x: hccl_ops.all_to_all_v(x, [2], [0], [2], [0]),
        lambda x: hccl_ops.all_to_all_v_c(x, [[2]], 0),
    ],
)
def test_other_collectives_have_no_gradient(collective):
    x = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(collective(x))
    with pytest.raises(LookupError, match="no gradient"):
        tape.gradient(loss, x)


@on_each_rank(2, gives=([1.0, 1.0, 1.0, 1.0], 1, 1))
def test_running_a_broadcast_assigns_the_variables():
    rank = current().rank
    with tf.Graph().as_default():
        variables = [
            tf.compat.v1.get_variable("plain", initializer=[float(rank)], use_resource=False),
            tf.compat.v1.get_variable("resource", initializer=[rank], use_resource=True),
            tf.compat.v1.get_variable("half", initializer=tf.constant([rank], tf.bfloat16), use_resource=True),
        ]
        sent = hccl_ops.broadcast([*variables, tf.constant(rank)], 1)
        with started_session() as session:
            session.run(tf.group(*[tensor.op for tensor in sent]))
            values = session.run([*variables, sent[-1]])
    variable = tf.Variable(rank)
    eager = hccl_ops.broadcast([variable], 1)[0]
    return [np.float64(value).item() for value in values], int(variable), int(eager)


@on_each_rank(2)
def test_an_unexpected_number_of_elements_is_an_error_on_the_receiver():
    refused = pytest.raises(tf.errors.InvalidArgumentError, match="on rank 1 of 2.*recv_counts")
    with refused if current().rank else contextlib.nullcontext():
        hccl_ops.all_to_all_v([1, 2, 3], [1, 1], [0, 1], [1, 1 + current().rank], [0, 1])


@pytest.mark.slow("four ranks share two cores")
@on_each_rank(4)
def test_one_name_stands_for_other_members_on_other_ranks():
    """Every rank calls its own data-parallel and model-parallel group by the same two names."""
    rank = current().rank
    total_before = hccl_ops.allreduce([1.0], "sum").numpy()
    data = [rank % 2, rank % 2 + 2]
    model = [rank // 2 * 2 + 1, rank // 2 * 2]
    api.create_group("data", 2, data)
    api.create_group("model", 2, model)
    facts = {}
    for name in ("data", "model"):
        facts[name] = (
            [api.get_world_rank_from_group_rank(name, position) for position in range(api.get_rank_size(name))],
            api.get_rank_id(name),
            (api.get_local_rank_id(name), api.get_local_rank_size(name)),
        )
    with tf.Graph().as_default():
        value = tf.compat.v1.get_variable("v", initializer=[1.0 + rank])
        size = 2
        fetches = {
            "sum": [hccl_ops.allreduce(value, "sum", group=name) for name in facts],
            "mean": npu_allreduce([value, value * 2.0], group="data"),
            "gather": hccl_ops.allgather(value, size, group="model"),
            "from": hccl_ops.broadcast([value], 1, group="data"),
            "part": hccl_ops.reduce_scatter(tf.tile(value, [2]), "max", size, group="model"),
            "all to all": hccl_ops.all_to_all_v_c(
                tf.tile(value, [2]), [[1, 1]] * 2, api.get_rank_id("data"), group="data"
            ),
            "grad": tf.gradients(hccl_ops.allreduce(value, "sum", group="model") * float(1 + rank), value),
        }
        with tf.compat.v1.Session() as session:
            session.run(value.initializer)
            results = session.run(fetches)
    for name in facts:
        api.destroy_group(name)
    api.create_group("data", 2, data)
    again = hccl_ops.allreduce([1.0 + rank], "sum", group="data").numpy()
    api.destroy_group("data")
    assert total_before == [4.0]
    model = sorted(model)
    assert facts["data"] == (data, rank // 2, (rank // 2, 2))
    assert facts["model"] == (model, rank % 2, (rank % 2, 2))
    assert {key: np.ravel(value).tolist() for key, value in results.items()} == {
        "sum": [2.0 + sum(data), 2.0 + sum(model)],
        "mean": [1.0 + sum(data) / 2, 2.0 + sum(data)],
        "gather": [1.0 + other for other in model],
        "from": [1.0 + data[1]],
        "part": [1.0 + model[1]],
        "all to all": [1.0 + other for other in data],
        "grad": [2.0 + sum(model)],
    }
    assert again == [2.0 + sum(data)]


@pytest.mark.slow("groups of four ranks")
@on_each_rank(3, by_rank=[[[2, 7], [2, 3], [2, 7]], None, [[0, 7], [0, 3], [0, 7]]])
def test_two_ranks_of_a_group_send_to_each_other():
    """Ranks 0 and 2 form a group and send to each other, under different name scopes; rank 1 does not."""
    rank = current().rank
    if rank == 1:
        api.create_group_of_others()
        return None
    api.create_group("pair", 2, [0, 2])
    other = 2 - rank
    with tf.Graph().as_default(), tf.compat.v1.name_scope(f"stage_{rank}"):
        sent = [hccl_ops.send(tf.constant([rank, tag]), tag, other) for tag in (3, 7, 7)]
        got = [hccl_ops.receive([2], tf.int32, tag, 1 - api.get_rank_id("pair"), "pair") for tag in (7, 3, 7)]
        with tf.compat.v1.Session() as session:
            values, _ = session.run([got, tf.group(*sent)])
    values = [value.tolist() for value in values]
    api.destroy_group("pair")
    return values


@pytest.mark.slow("three ranks of its own")
@pytest.mark.horovod("its groups are process sets")
@on_each_rank(3)
def test_where_horovod_allows_no_groups_the_message_says_how():
    """As under MPI: there is no way to restart Horovod."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("HOROVOD_GLOO_RENDEZVOUS_ADDR")
        with pytest.raises(RuntimeError, match=r'hvd\.init\(process_sets="dynamic"\)'):
            api.create_group("pair", 2, [1, 2]) if current().rank else api.create_group_of_others()


def gradients_of_a_list():
    """Everything `npu_allreduce`, `allreduce` and `reduce` of npu_optimizer take."""
    rank = current().rank
    rows = tf.IndexedSlices(tf.constant([[1.0 + rank]]), tf.constant([rank]), tf.constant([5, 1]))
    dense, whole = tf.constant([1.0 + rank, 4.0]), tf.constant([1 + rank, 4])
    mean, integers, sparse = npu_allreduce([dense, whole, rows])
    results = {
        "mean": mean.numpy().tolist(),
        "integers": integers.numpy().tolist(),
        "sparse": (
            sparse.values.numpy().tolist(),
            sparse.indices.numpy().tolist(),
            sparse.dense_shape.numpy().tolist(),
        ),
        "single": npu_allreduce(dense, "max", fusion=0).numpy().tolist(),
        "together": [value.numpy().tolist() for value in npu_allreduce((dense, dense), "sum", 2, 5)],
        "allreduce": npu_optimizer.allreduce(dense).numpy().tolist(),
        "reduce": npu_optimizer.reduce(dense, 1, average=False).numpy().tolist(),
        "sum of rows": npu_optimizer.allreduce(rows, average=False).values.numpy().tolist(),
    }
    x = tf.Variable([2.0])
    with tf.GradientTape(persistent=True) as tape:
        loss = npu_allreduce([x * x])[0]
        other = npu_allreduce(x * x, "max")
    results["gradient"] = tape.gradient(loss, x).numpy().tolist()
    try:
        tape.gradient(other, x)
    except LookupError:
        results["no gradient"] = True
    return results


def test_npu_allreduce_takes_single_gradients_lists_and_sparse_ones(on_ranks):
    for results in on_ranks(2, gradients_of_a_list):
        assert results == {
            "mean": [1.5, 4.0],
            "integers": [1, 4],
            "sparse": ([[0.5], [1.0]], [0, 1], [5, 1]),
            "single": [2.0, 4.0],
            "together": [[3.0, 8.0]] * 2,
            "allreduce": [1.5, 4.0],
            "reduce": [3.0, 8.0],
            "sum of rows": [[1.0], [2.0]],
            "gradient": [4.0],
            "no gradient": True,
        }


USED = [[2.0, 2.0], [1.0, 1.0], [0.5] * 4, [1.0, 1.0], [1, 1], [1.0, 1.0], [1.0, 1.0]]


@on_each_rank(2, by_rank=[USED, [[1.0, 1.0]]])
def test_a_function_runs_collectives_whose_results_only_another_rank_uses():
    """Returns results of collectives in a function that is called in a function."""

    @tf.function
    def exchanged(value):
        rows = tf.IndexedSlices(value, tf.constant([0, 1]), [2])
        combined = [hccl_ops.allreduce(value, "sum"), hccl_ops.reduce(value, "max", 0), npu_allreduce([rows])[0].values]
        sums = npu_allreduce([value, tf.cast(value, tf.int32)])
        results = [*combined, *sums, *hccl_ops.broadcast([value], 0), hccl_ops.allgather(value[:1], 2)]
        return results if current().rank == 0 else [value]

    return [value.numpy().tolist() for value in tf.function(lambda value: exchanged(value))(tf.ones([2]))]


# Ranks send gradients, and whatever a script sends, in every iteration of a loop.
BATCHES_OF_BODIES = [[[1.0, 2.0], [2.0, 1.0]], [[4.0, 1.0], [8.0, 3.0]], [[0.5, 3.0], [1.5, 2.0]]]


def train_in_body(name, place):
    """On a rank: the weights after each step on this rank's batches; the place by its name."""
    (found,) = (one for one in BODIES if one.__name__ == place)
    return train(name, found, [batches[current().rank] for batches in BATCHES_OF_BODIES])


@pytest.mark.slow("trains in every body; the cases below have the sums")
def test_the_mean_is_trained_on(on_ranks):
    for place in BODIES:
        expected, _ = train("stock", place, np.mean(BATCHES_OF_BODIES, axis=1).tolist())
        for name in ("distributed", "all", "tailed"):
            for trained, steps in on_ranks(2, train_in_body, name, place.__name__):
                np.testing.assert_array_equal(trained, expected)
                assert steps == 3


@pytest.mark.parametrize("is_classic", [True, False])
@on_each_rank(2)
def test_a_sum_in_a_loop_is_sent_in_each_iteration(is_classic):
    """The numbers do not wait for one another."""
    with tf.Graph().as_default(), classic_control_flow() if is_classic else contextlib.nullcontext():

        def body(i, sums):
            return i + 1, sums.write(i, hccl_ops.allreduce(tf.cast([i], tf.float32), "sum"))

        array = tf.compat.v1.TensorArray(tf.float32, 40)
        _, sums = tf.compat.v1.while_loop(lambda i, sums: i < 40, body, [tf.constant(0), array])
        with tf.compat.v1.Session() as session:
            sums = session.run(sums.concat())
    np.testing.assert_array_equal(sums, np.arange(40) * 2)


@tf.function
def sum_in_a_function():
    sums = tf.TensorArray(tf.float32, 40)
    for i in tf.range(40):
        sums = sums.write(i, hccl_ops.allreduce(tf.cast(tf.reshape(i, [1]), tf.float32), "sum"))
    return sums.concat()


@on_each_rank(2)
def test_so_it_is_in_a_loop_of_a_function():
    """Makes the sums of the loop above, and a step on gradients added up in a loop."""
    weights, numbers = tf.Variable([1.0, 2.0]), tf.constant(BATCHES_OF_BODIES)[:, current().rank]
    optimizer = NPUDistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.125))

    def loss(values):
        return tf.reduce_sum(weights * values)

    @tf.function
    def step():
        total = tf.zeros([2])
        for values in numbers:
            ((gradient, _),) = optimizer.compute_gradients(functools.partial(loss, values), [weights])
            total += gradient
        optimizer.apply_gradients([(total, weights)])

    step()
    sums, weights = sum_in_a_function().numpy(), weights.numpy()
    expected = [1.0, 2.0] - 0.125 * np.sum(np.mean(BATCHES_OF_BODIES, axis=1), axis=0)
    np.testing.assert_array_equal(sums, np.arange(40) * 2)
    np.testing.assert_array_equal(weights, expected)
