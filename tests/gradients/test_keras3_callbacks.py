"""The callbacks of this package in `fit` of Keras 3, whose list takes what has the methods of a callback."""

from __future__ import annotations

import contextlib
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.gradients.checkpoints.sync import batch_counters, count_batches
from npu_bridge.npu_init import npu_callbacks_append, npu_keras_optimizer
from npu_bridge.reporting import CsvWriter, MetricsCallback, ReportCallback, TensorBoardCallback
from npu_bridge.reporting.summary import StepTimes
from npu_bridge.session import EndTogetherCallback, ResumeCallback
from npu_bridge.session.precision import AccelerateTrainCallback, Policy
from npu_run.trials.fit import TrainStepCallback, numbered_variables
from tests.goldens.keras3_models import Trace, beside_keras3, dynamic, fit, make_model, state_of
from tests.goldens.keras_models import make_data
from tests.goldens.two_layers import assert_same_bits
from tests.ranks.test_resume_callback import SCORES, fit_by_scores

pytestmark = beside_keras3
BATCHES = 6


def sgd():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def batches(count=BATCHES):
    return tf.data.Dataset.from_tensor_slices(make_data(count)).batch(8)


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, dynamic], ids=["bare", "wrapped"])
def test_they_change_no_bit(wrap, tmp_path):
    alone, losses = fit(wrap(sgd()), make_data(BATCHES))
    others = [
        ReportCallback(str(tmp_path / "report")),
        MetricsCallback(CsvWriter(str(tmp_path / "numbers.csv")), 2),
        TensorBoardCallback(str(tmp_path / "events")),
        ResumeCallback(str(tmp_path / "model.keras"), every_n_steps=4),
    ]
    trained, same_losses = fit(wrap(sgd()), make_data(BATCHES), callbacks=npu_callbacks_append(others))
    assert_same_bits(state_of(trained), state_of(alone))
    assert same_losses == losses


def test_a_report_knows_steps_scales_and_skips(tmp_path):
    folder = tmp_path / "report"
    _, losses = fit(dynamic(sgd()), make_data(BATCHES, poisoned=[2]), callbacks=[ReportCallback(str(folder))])
    rows = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "step" in row and "loss_scale" in row]
    assert [row["skipped"] for row in steps] == [False, False, True, False, False, False]
    assert [row["loss_scale"] for row in steps] == [1024.0, 1024.0, 1024.0, 512.0, 512.0, 512.0]
    assert [row["loss"] for row in steps][:2] == losses[:2]
    assert "<html" in (folder / "report.html").read_text()


def test_a_report_of_a_fit_that_fails(tmp_path):
    tokens, labels = make_data(2)
    tokens[8:] = 1000  # the embedding has 10 rows
    with pytest.raises(tf.errors.InvalidArgumentError):
        fit(sgd(), (tokens, labels), callbacks=[ReportCallback(str(tmp_path))])
    assert "is not in [0, 10)" in (tmp_path / "report.html").read_text()


def test_numbers_of_metrics(tmp_path):
    path = tmp_path / "numbers.csv"
    fit(dynamic(sgd()), make_data(BATCHES), callbacks=[MetricsCallback(CsvWriter(str(path)), 2)])
    lines = [line.split(",") for line in path.read_text().splitlines()]
    assert [line[0] for line in lines] == ["step", "1", "3", "5", "6"][: len(lines)]
    assert [float(line[2]) for line in lines[1:3]] == [1024.0, 2048.0]
    assert float(lines[1][4]) == pytest.approx(0.05)


@pytest.mark.parametrize("has_steps", [False, True])
def test_epochs_end_with_the_data(has_steps):
    end, model = EndTogetherCallback(), make_model()
    model.compile(dynamic(sgd()), "mse")
    data = batches().repeat() if has_steps else batches()
    steps = {"steps_per_epoch": 4} if has_steps else {}
    model.fit(end.look_ahead(data), epochs=3, verbose=0, callbacks=[end], **steps)
    assert int(model.optimizer.iterations) == (12 if has_steps else 18)
    other = make_model()
    other.compile(dynamic(sgd()), "mse")
    other.fit(data, epochs=3, verbose=0, **steps)
    assert_same_bits(state_of(model), state_of(other))
    with pytest.raises(ValueError, match="fit does not train on the dataset of look_ahead"):
        model.fit(data, verbose=0, callbacks=[EndTogetherCallback()], **steps)


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, dynamic], ids=["bare", "wrapped"])
def test_an_interrupted_fit_goes_on_with_the_same_bits(wrap, tmp_path):
    states = []
    for stops in ([], [4]):
        path = str(tmp_path / f"{len(stops)}.keras")
        for until in (*stops, 10):
            model, resume = make_model(), ResumeCallback(path, every_n_steps=2)
            model.compile(wrap(sgd()), "mse")
            done = resume.restore(model)
            assert done == (4 if stops and until == 10 else 0)
            data = batches(10).skip(done)
            model.fit(data, steps_per_epoch=until - done, verbose=0, callbacks=npu_callbacks_append([resume]))
        states.append(state_of(model))
    assert_same_bits(states[1], states[0])


def test_weights_that_are_swapped_between_epochs_are_swapped_back_in_a_resumed_fit(tmp_path):
    def fitted(name, last=None, swaps=True):
        def end(epoch, logs):
            if epoch == last:
                raise InterruptedError

        model, resume = make_model(), ResumeCallback(tmp_path / f"{name}.keras")
        model.compile(npu_keras_optimizer(keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.5)), "mse")
        first = resume.restore(model) // 2
        swap = [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)] if swaps else []
        callbacks = npu_callbacks_append([keras.callbacks.LambdaCallback(on_epoch_begin=end), *swap, resume])
        with contextlib.suppress(InterruptedError):
            model.fit(batches(2), initial_epoch=first, epochs=3, verbose=0, callbacks=callbacks)
        return state_of(model)

    fitted("cut", last=1)
    with pytest.raises(ValueError, match="saved weights are averages. Expected SwapEMAWeights"):
        fitted("cut", swaps=False)
    assert_same_bits(fitted("cut"), fitted("whole"))


def test_a_script_that_accumulates_otherwise_does_so_in_a_resumed_fit(tmp_path):
    for steps in (2, 3):
        model, resume = make_model(), ResumeCallback(tmp_path / "it.keras")
        model.compile(keras.optimizers.SGD(0.05, gradient_accumulation_steps=steps), "mse")
        resume.restore(model)
        assert model.optimizer.gradient_accumulation_steps == steps
        model.fit(batches(), verbose=0, callbacks=[resume])


def test_batches_that_keras_accumulates_are_counted_and_named(caplog):
    optimizer = dynamic(keras.optimizers.SGD(0.05, gradient_accumulation_steps=4))
    fit(optimizer, make_data(6, poisoned=[2]), callbacks=npu_callbacks_append([]))
    assert batch_counters(optimizer) == [1] and count_batches(optimizer) == 6
    assert "fit: the gradients of 1 batch are not applied yet" in caplog.text


def test_a_record_leaves_the_variables_of_a_built_optimizer():
    model = make_model()
    model.compile(keras.optimizers.LossScaleOptimizer(sgd()), "mse")
    first = numbered_variables(model)
    assert [*numbered_variables(model)] == [*first]


def test_a_record_leaves_out_inputs_that_are_left_out():
    class Sum(keras.layers.Layer):
        def call(self, one, other=None):
            return one if other is None else one + other

    ones, inputs = np.ones([4, 3], np.float32), [keras.Input([3]), keras.Input([3], optional=True)]
    model = keras.Model(inputs, keras.layers.Dense(1)(Sum()(*inputs)))
    model.compile(sgd(), "mse")
    model.fit([ones, None], ones[:, :1], verbose=0, callbacks=[TrainStepCallback(model, 0)])
    assert int(model.optimizer.iterations) == 1


@pytest.mark.parametrize("steps", [{}, {"steps_per_epoch": 5}])
def test_a_last_execution_of_fewer_steps_counts_no_more_than_it_trains(steps, tmp_path, monkeypatch):
    def compiled():
        model = make_model()
        model.compile(sgd(), "mse", steps_per_execution=3)
        return model

    in_runs, report = [], ReportCallback(str(tmp_path))
    monkeypatch.setattr(StepTimes, "add", lambda self, secs, steps: in_runs.append(steps))
    accelerate, resume = AccelerateTrainCallback("fast|step|0.6", total_step=10), ResumeCallback(tmp_path / "it.keras")
    policies, model = Trace(lambda _: accelerate.policy == Policy("mixed", "float16")), compiled()
    data = batches(10).repeat() if steps else batches(5)
    for _ in range(2):
        model.fit(data, verbose=0, callbacks=[accelerate, resume, policies, report], **steps)
    assert ResumeCallback(tmp_path / "it.keras").restore(compiled()) == int(model.optimizer.iterations)
    assert in_runs == ([3, 3, 3, 3] if steps else [3, 2, 3, 2])
    assert policies.values == ([True, True, False, False] if steps else [True, True, True, False])


def test_the_first_part_of_a_fit_computes_in_low_precision():
    class Policies(keras.callbacks.Callback):
        seen = []

        def on_train_batch_end(self, batch, logs=None):
            self.seen.append((accelerate.policy, float(logs["loss"])))

    accelerate, policies = AccelerateTrainCallback("fast|step|0.5"), Policies()
    low, low_losses = fit(dynamic(sgd()), make_data(BATCHES), callbacks=[accelerate, policies])
    _, losses = fit(dynamic(sgd()), make_data(BATCHES))
    assert [policy == Policy("mixed", "float16") for policy, _ in policies.seen] == [True] * 3 + [False] * 3
    assert low_losses[0] != losses[0]
    np.testing.assert_allclose(low_losses, losses, rtol=1e-2)


def test_the_first_part_is_counted_in_updates_where_keras_accumulates():
    accelerate = AccelerateTrainCallback("fast|step|0.5", total_step=4)
    policies = Trace(lambda _: accelerate.policy == Policy("mixed", "float16"))
    fit(keras.optimizers.SGD(0.05, gradient_accumulation_steps=2), make_data(6), callbacks=[accelerate, policies])
    assert policies.values == [True] * 4 + [False] * 2


@pytest.mark.parametrize("is_first", [True, False])
def test_callbacks_go_on_counting_in_a_resumed_fit(tmp_path, is_first):
    rates, weights = fit_by_scores(keras, str(tmp_path / "whole.keras"), (len(SCORES),), is_first)
    assert len(rates) == 12 and len(set(rates.values())) == 4
    cut = fit_by_scores(keras, str(tmp_path / "cut.keras"), (1, 4, 7, len(SCORES)), is_first)
    assert cut[0] == rates
    for resumed, expected in zip(cut[1], weights, strict=True):
        np.testing.assert_array_equal(resumed, expected)
