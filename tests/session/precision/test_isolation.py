"""Sessions of one process do not disturb each other, and the environment is left as it was."""

from __future__ import annotations

import concurrent.futures
import os
import threading
import time

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.base import environment
from npu_bridge.base.equal_blocks import EqualBlocks
from npu_bridge.session.precision.rounding import edit_new_operators
from tests.session.precision.small_models import (
    Dense,
    dtypes_of,
    kernels_of,
    precision_of,
    run_with_graph,
    session_of,
    started,
    tell_steps,
)

# Kernels of matrix products, and the dtype of Relu and its gradient; oneDNN fuses float32 ones with products.
EXPECTED = {
    "mixed_float16": ({"float16": 5}, {"float16"}),
    "cube_fp16in_fp32out": ({"float16": 5}, {"float32"}),
    "fp16": ({"float16": 5}, {"float16"}),
    "origin": ({"float32": 5}, {"float32"}),
}


def train(mode, steps=3):
    model = Dense()
    with started(model, precision_of(precision_mode_v2=mode)) as session:
        for step in range(steps):
            nodes = run_with_graph(session, [model.train_op, model.loss], model.batch(step))[1]
        return dtypes_of(nodes), set(kernels_of(nodes, "Relu"))


def test_two_policies_of_one_graph():
    model = Dense()
    with session_of(model.graph, precision_of(precision_mode_v2="mixed_float16")) as low:
        with session_of(model.graph, precision_of(precision_mode_v2="origin")) as original:
            for session, dtype in ((low, "float16"), (original, "float32"), (low, "float16")):
                session.run(model.init)
                nodes = run_with_graph(session, model.train_op, model.batch(0))[1]
                assert dtypes_of(nodes) == {dtype: 5}


def test_policies_in_threads():
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = dict(zip(EXPECTED, pool.map(train, EXPECTED)))
    assert results == EXPECTED


def test_the_environment_is_as_it_was():
    environment.write_variable("TOTAL_STEP", "4")
    environment.write_variable("STEP_NOW", "0")
    before = dict(os.environ)
    for mode in EXPECTED:
        train(mode, steps=1)
    assert dict(os.environ) == before


def test_the_users_own_lists_count_too(monkeypatch):
    monkeypatch.setenv("TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_DENYLIST_ADD", "MatMul")
    monkeypatch.setenv("TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_ALLOWLIST_REMOVE", "MatMul")
    assert train("mixed_float16")[0] == {"float32": 5}
    assert environment.read_variable("TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_DENYLIST_ADD") == "MatMul"


def test_temporarily_restores_after_an_error(monkeypatch):
    monkeypatch.setenv("NPU_BRIDGE_TEST_OLD", "old")
    try:
        with environment.set_variables_temporarily(lambda: {"NPU_BRIDGE_TEST_OLD": "new", "NPU_BRIDGE_TEST_NONE": "x"}):
            assert os.environ["NPU_BRIDGE_TEST_OLD"] == "new"
            raise KeyError
    except KeyError:
        pass
    assert os.environ["NPU_BRIDGE_TEST_OLD"] == "old"
    assert "NPU_BRIDGE_TEST_NONE" not in os.environ


def test_threads_with_equal_values_share_a_block_and_others_wait():
    """A thread in its block can wait for a thread that needs equal values: a generator of batches, or another rank."""

    def read_in_block(text):
        with environment.set_variables_temporarily(lambda: {"NPU_BRIDGE_TEST_NONE": text}):
            return environment.read_variable("NPU_BRIDGE_TEST_NONE")

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        with environment.set_variables_temporarily(lambda: {"NPU_BRIDGE_TEST_NONE": "x"}):
            assert pool.submit(read_in_block, "x").result(20) == "x"
            other = pool.submit(read_in_block, "y")
            assert read_in_block("z") == "z"
            assert environment.read_variable("NPU_BRIDGE_TEST_NONE") == "x"
            assert environment.read_outside_blocks("NPU_BRIDGE_TEST_NONE") is None
        assert other.result(20) == "y"
    assert "NPU_BRIDGE_TEST_NONE" not in os.environ


def test_threads_in_one_block_may_each_begin_another_inside():
    meeting, entries, found = threading.Barrier(2), {}, []
    blocks = EqualBlocks(entries)

    def nest(text):
        with blocks.enter(lambda: {"name": "shared"}):
            meeting.wait(20)
            with blocks.enter(lambda: {"name": text}):
                seen = entries["name"]
            time.sleep(0.05)  # the other thread looks meanwhile
            found.append((seen, entries["name"]))

    threads = [threading.Thread(target=nest, args=(text,), daemon=True) for text in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(found) == [("a", "shared"), ("b", "shared")] and not entries


def test_threads_round_each_operator_of_a_graph_once(graph):
    found = []
    tf.constant(1.0, name="early")

    def edit():
        with edit_new_operators(graph, "rules", lambda: None) as (_, ops):
            found.append([op.name for op in ops])
            time.sleep(0.2)
            if len(found) == 1:
                with graph.as_default():  # as a third thread
                    tf.constant(1.0, name="late")

    threads = [threading.Thread(target=edit) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [["early"], ["late"]]


def test_a_thread_that_gives_up_waiting_keeps_the_entries_of_its_outer_block():
    entries, seen = {}, []
    blocks = EqualBlocks(entries)

    def be_interrupted():
        raise KeyboardInterrupt

    def look():
        with blocks.enter(lambda: {"name": "other"}):
            seen.append(entries["name"])

    other = threading.Thread(target=look, daemon=True)
    with blocks.enter(lambda: {"name": "outer"}):
        with pytest.raises(KeyboardInterrupt), blocks.enter(be_interrupted):
            pass
        other.start()
        other.join(0.2)
        assert not seen and entries == {"name": "outer"}
    other.join(20)
    assert seen == ["other"] and not entries


def test_a_stock_session_is_not_touched():
    model, other = Dense(), Dense()
    with started(model) as stock:
        alone = stock.run(model.loss, model.batch(0))
    with started(other, precision_of(experimental_accelerate_train_mode="fast|step|0.5")) as session:
        tell_steps(0, 10)
        session.run(other.train_op, other.batch(0))
        with started(model) as stock:
            np.testing.assert_array_equal(stock.run(model.loss, model.batch(0)), alone)
