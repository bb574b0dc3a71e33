"""Two ranks that exchange tensors by TensorFlow's own collective operators keep the promises of ranks of Horovod."""

from __future__ import annotations

import platform
import socket

import numpy as np
import psutil
import pytest
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.collective.engines import engine_of_ranks
from npu_bridge.collective.rendezvous.key_value_store import KeyValueStore
from npu_bridge.estimator.npu.npu_optimizer import NPUDistributedOptimizer
from npu_bridge.hccl import hccl_ops
from tests.npu_run.launching import ONE, OTHER, npu_run, write_script, write_ssh
from tests.rank_pool import RankPools, be_there
from tests.ranks.test_hccl_ops import gradients_of_a_list
from tests.ranks.test_keras import fit_with_an_overflow_on_rank_1

tf1 = tf.compat.v1
DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int16", "int32", "int64", "bool")
pytestmark = pytest.mark.ranks(2)


@pytest.fixture(scope="module")
def on_two(tmp_path_factory, rank_pools):
    """Runs a function of a module on two such ranks."""
    pools = RankPools(tmp_path_factory.mktemp("tensorflow_ranks"))

    def run(function, *arguments):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("NPU_COLLECTIVES", "tensorflow")  # for ranks that are started now
            return pools.run(2, function, *arguments)

    run(be_there)
    yield run
    pools.close()


def values_of(rank, dtype):
    """Numbers whose sum has to be rounded, and whose number differs from rank to rank."""
    drawn = np.random.default_rng(rank).normal(size=[3 + 2 * rank, 2]) * 40
    return tf.cast(drawn, dtype) if dtype != "bool" else tf.constant(drawn > 0)


def exchange(dtype):
    """Runs each operation on a rank: eagerly, in a function, in one of unknown shapes, and in a session."""
    ranks = collective.current()
    values = values_of(ranks.rank, dtype)

    def operations(own):
        found = {
            "gather": ranks.all_gather(own, "gather"),
            "broadcast": ranks.broadcast(own[:2], 1, "broadcast"),
            "broadcast of nothing": ranks.broadcast(own[:0], 1, "nothing"),
            "all to all": ranks.all_to_all(own, [1, 2 + 2 * ranks.rank], "all_to_all"),
        }
        if dtype != "bool":
            found["sum"] = ranks.reduce(own[:3], "sum", "sum")
            found["sums"] = ranks.all_reduce([own[:3], own[1:3]], "sums", average=False)
            found["largest"] = ranks.reduce(own[:3], "max", "max")
            found["part"] = ranks.reduce_scatter(own[:2], "sum", "part")
        if own.dtype.is_floating:
            found["mean"] = ranks.all_reduce([own[:3], own[1:3]], "mean", prescale=0.5)
        return found

    unknown = tf.function(operations, input_signature=[tf.TensorSpec([None, 2], dtype)])
    ways = [operations(values), tf.function(operations)(values), unknown(values)]
    with tf.Graph().as_default(), tf1.Session() as session:
        fed = tf1.placeholder(dtype, values.shape)
        ways.append(session.run(operations(fed), {fed: values.numpy()}))
    return [[np.asarray(value) for value in tf.nest.flatten(way)] for way in ways]


@pytest.mark.few_fast(["float32", "float16", "int8"], "one of each way to send a dtype")
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_way_gives_what_horovod_gives(on_two, on_ranks, dtype):
    ours, horovods = on_two(exchange, dtype), on_ranks(2, exchange, dtype)
    for own, other in zip(ours, horovods):
        for way in own:
            for value, right in zip(way, other[0], strict=True):
                np.testing.assert_array_equal(value, right)


def test_keras_fit_and_the_documented_collectives_are_those_of_horovod(on_two, on_ranks):
    for function, *arguments in ((fit_with_an_overflow_on_rank_1, "current", "dynamic"), (gradients_of_a_list,)):
        for own, right in zip(on_two(function, *arguments), on_ranks(2, function, *arguments)):
            tf.nest.map_structure(np.testing.assert_array_equal, own, right)


def send_without_a_known_shape():
    """Sends rows from rank 0, which learns their number at the run, to rank 1, which always knows it; and back."""
    rank = collective.current().rank
    with tf.Graph().as_default(), tf1.Session() as session:
        rows = tf1.placeholder_with_default(tf.ones([3, 2]), [None, 2])
        message = hccl_ops.receive([3, 2], tf.float32, 5, 0) if rank else hccl_ops.send(rows, 5, 1)
        back = hccl_ops.broadcast([tf.fill([3, 2], 4.0) if rank else rows], 1)[0]
        return [None if value is None else value.tolist() for value in session.run([message, back])]


def test_one_of_two_ranks_may_learn_the_shape_of_a_tensor_at_the_run(on_two):
    rows = np.ones([3, 2])
    assert on_two(send_without_a_known_shape) == [[None, (4 * rows).tolist()], [rows.tolist(), (4 * rows).tolist()]]


def share_the_update():
    """On a rank: the error of an optimizer whose slots rank 0 would ask for in runs of its own."""
    with tf.Graph().as_default(), pytest.raises(RuntimeError) as error:
        loss = tf.reduce_sum(tf1.get_variable("a", [2]) * tf1.get_variable("b", [2]))
        momentum = tf1.train.MomentumOptimizer(0.5, 0.9)
        NPUDistributedOptimizer(momentum, is_weight_update_sharding=True).minimize(loss)
    return str(error.value)


def test_an_update_cannot_be_shared_in_a_graph(on_two):
    assert all("Install Horovod" in text for text in on_two(share_the_update))


def reach_from_elsewhere():
    """On a rank: whether each address of this machine reaches the server of rank 1."""
    collective.current()
    port = int(KeyValueStore("tensorflow_servers").get(1).rpartition(":")[2])
    found = []
    addresses = {
        each.address for every in psutil.net_if_addrs().values() for each in every if each.family == socket.AF_INET
    }
    for source in sorted(addresses):
        with socket.socket() as stranger:
            stranger.settimeout(0.5)
            stranger.bind((source, 0))
            found.append((source, stranger.connect_ex((source, port)) == 0))
    return found


def test_only_this_machine_reaches_the_servers(on_two):
    for found in on_two(reach_from_elsewhere):
        assert ("127.0.0.1", True) in found
        assert all(is_reached is source.startswith("127.") for source, is_reached in found)


@pytest.mark.slow("starts a job of its own")
def test_a_killed_rank_is_named_and_the_other_is_ended(tmp_path):
    script = """
        import os, signal
        import tensorflow as tf
        from npu_bridge import collective
        ranks = collective.current()
        for step in range(100):
            ranks.all_reduce([tf.ones([1000])], "mean")
            if (step, ranks.rank) == (3, 1):
                os.kill(os.getpid(), signal.SIGKILL)
    """
    code, output = npu_run("--collectives", "tensorflow", "-np", 2, write_script(tmp_path, script), cwd=tmp_path)
    assert code == 137 and "tensors go through TensorFlow's own collectives" in output
    assert "rank 1 of 2" in output.splitlines()[-1] and "SIGKILL" in output.splitlines()[-1]


def test_several_hosts_are_refused_until_open_ports_are_allowed(tmp_path):
    script = write_script(tmp_path, "")
    words = ["--collectives", "tensorflow", "-H", "127.0.0.1:1,one.invalid:1"]
    code, output = npu_run(*words, script, cwd=tmp_path)
    assert code == 2 and "Expected --allow-open-ports for several hosts; got none" in output, output
    assert "leave out --collectives" in output
    code, output = npu_run(*words, "--allow-open-ports", script, cwd=tmp_path)
    assert "--allow-open-ports" not in output and "one.invalid" in output, output


@pytest.mark.slow("two hosts in namespaces; ranks/ has the same collectives on one")
def test_two_hosts_meet_and_other_machines_and_proxies_stay_out(tmp_path):
    """Both hosts are this machine, whose addresses of the loopback stand for machines outside the job."""
    script = """
        import socket
        import tensorflow as tf
        from npu_bridge import collective
        from npu_bridge.collective.rendezvous.key_value_store import KeyValueStore
        ranks = collective.current()
        total = ranks.reduce(tf.constant([1.0 + ranks.rank]), "sum", "sum").numpy()
        host, _, port = KeyValueStore("tensorflow_servers").get(1 - ranks.rank).rpartition(":")
        reached = []
        for source in (host, "127.0.0.1", "127.0.0.2"):
            with socket.socket() as stranger:
                stranger.settimeout(0.5)
                stranger.bind((source, 0))
                reached.append(stranger.connect_ex((host, int(port))) == 0)
        print("got", host.startswith("127."), total, reached)
        ranks.reduce(total, "sum", "end")
    """
    words = ["--collectives", "tensorflow", "--allow-open-ports", "-H", f"{ONE}:1,{OTHER}:1"]
    proxies = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "no_proxy": "elsewhere"}
    code, output = npu_run(*words, write_script(tmp_path, script), cwd=tmp_path, **write_ssh(tmp_path), **proxies)
    assert code == 0 and output.count("got False [3.] [True, False, False]") == 2, output


def test_without_horovod_the_line_at_the_start_says_how_to_get_it(monkeypatch):
    monkeypatch.delenv("NPU_COLLECTIVES", raising=False)
    monkeypatch.setattr(engine_of_ranks, "_has_horovod", lambda: False)
    assert engine_of_ranks.choose_engine() == "tensorflow"
    assert "use Horovod (install it: npu-run doctor --fix)" in engine_of_ranks.describe_engine()


@pytest.mark.slow("three jobs")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of system calls are those of x86_64")
def test_a_kernel_that_refuses_the_filter_ends_the_job_unless_open_ports_are_allowed(tmp_path):
    script = """
        import ctypes, struct
        SETSOCKOPT, ATTACH_FILTER, NOT_PERMITTED = 54, 26, 1
        rows = [(0x20, 0, 0, 0), (0x15, 0, 3, SETSOCKOPT), (0x20, 0, 0, 32), (0x15, 0, 1, ATTACH_FILTER)]
        rows += [(0x06, 0, 0, 0x00050000 | NOT_PERMITTED), (0x06, 0, 0, 0x7FFF0000)]
        program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *row) for row in rows))
        filter_ = ctypes.create_string_buffer(struct.pack("HP", len(rows), ctypes.addressof(program)))
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, filter_, 0, 0) == 0  # seccomp, from here on
        import tensorflow as tf
        from npu_bridge import collective
        print("sum", collective.current().reduce(tf.constant([1.0]), "sum", "sum").numpy())
    """
    words = ["--collectives", "tensorflow", "-np", 2]
    problem = "of this rank. Expected a filter in the kernel that drops their packets; got Operation not permitted"
    code, output = npu_run(*words, write_script(tmp_path, script), cwd=tmp_path)
    assert code == 1 and problem in output and "sum [" not in output, output
    code, output = npu_run(*words, "--allow-open-ports", write_script(tmp_path, script), cwd=tmp_path)
    assert code == 0 and problem in output and output.count("sum [2.]") == 2, output
