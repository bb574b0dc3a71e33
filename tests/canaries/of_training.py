"""Canaries of `npu_bridge/base/tf_internals/training.py`, `savers.py` and `names.py`, and of `inherited.py` here."""

from __future__ import annotations

import concurrent.futures
import functools
import importlib
import os
import sys
import tempfile
import threading
import time
import types

import numpy as np
import tensorflow as tf

from npu_bridge.base.tf_internals import callers, names, savers, training
from tests.canaries import canary_of, expect, kept, of_keras3
from tests.garbage import collect_garbage

v1 = tf.compat.v1
legacy = tf.keras.optimizers.legacy


def variable_and_loss():
    variable = v1.get_variable("v", [], use_resource=True)
    return variable, variable * variable


@canary_of(training.create_slots)
def _():
    variable, _ = variable_and_loss()
    optimizer = v1.train.MomentumOptimizer(0.1, 0.9)
    training.create_slots(optimizer, [variable])
    expect(optimizer.get_slot(variable, "momentum") is not None, "there is no slot")


@canary_of(training.create_all_weights, training.scope_of_variables)
def _():
    variable, _ = variable_and_loss()
    optimizer = legacy.SGD(0.1, 0.9, name="scope")
    training.create_all_weights(optimizer, [variable])
    expect(optimizer.get_slot(variable, "momentum") is not None, "there is no slot")
    expect(training.scope_of_variables(optimizer) == "scope", "the scope has another name")


@canary_of(training.compute_legacy_gradients, training.has_stock_aggregation, eagerly=True)
def _():
    variable, optimizer = tf.Variable(3.0), legacy.SGD(0.1)
    with tf.GradientTape() as tape:
        loss = variable * variable
    ((gradient, of),) = training.compute_legacy_gradients(optimizer, loss, [variable], None, tape)
    expect(float(gradient) == 6.0 and of is variable, "there is another gradient")
    own = type("Own", (legacy.SGD,), {names.LEGACY_AGGREGATE: lambda self, pairs: pairs})(0.1)
    expect(training.has_stock_aggregation(optimizer), "SGD has a method of its own")
    expect(not training.has_stock_aggregation(own), "a method of its own is not seen")
    expect(callable(getattr(legacy.Optimizer, names.LEGACY_COMPUTE, None)), f"there is no {names.LEGACY_COMPUTE}")


@canary_of(training.watch_keras_optimizers, eagerly=True)
def _():
    modules = [importlib.import_module(names.KERAS_OPTIMIZER_MODULE)]
    modules.append(importlib.import_module(names.KERAS_LEGACY_OPTIMIZER_MODULE))
    classes = [modules[0]._BaseOptimizer, modules[0].Optimizer, modules[1].OptimizerV2]
    before, told = [dict(vars(each)) for each in classes], []
    try:
        training.watch_keras_optimizers(
            lambda optimizer: told.append((optimizer, "made")),
            lambda optimizer, pairs: told.append((optimizer, [(float(grad), float(of)) for grad, of in pairs])),
        )
        for kind in (tf.keras.optimizers.SGD, legacy.SGD):
            variable, optimizer = tf.Variable(3.0), kind(0.5)
            optimizer.apply_gradients([(tf.constant(2.0), variable)])
            expect(float(variable) == 2.0, f"{type(optimizer)} does not update")
            expect(told == [(optimizer, "made"), (optimizer, [(2.0, 3.0)])], f"{type(optimizer)} told {told}")
            told.clear()
    finally:
        for each, methods in zip(classes, before):
            for name in ("__init__", "_internal_apply_gradients", "_distributed_apply"):
                if name in methods:
                    setattr(each, name, methods[name])


@canary_of(training.learning_rates)
def _():
    variable, loss = variable_and_loss()
    for optimizer in (v1.train.GradientDescentOptimizer(0.25), v1.train.AdamOptimizer(0.25), legacy.SGD(0.25)):
        optimizer.apply_gradients([(tf.ones_like(loss), variable)])
        known = [tf.convert_to_tensor(rate) for rate in training.learning_rates(optimizer) if rate is not None]
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            values = session.run(known)
        expect(values and set(values) == {0.25}, f"{type(optimizer)} has the learning rates {values}")


@canary_of(training.learning_rates, eagerly=True)
def _():
    known = [rate for rate in training.learning_rates(tf.keras.optimizers.SGD(0.25)) if rate is not None]
    expect(known and all(float(rate) == 0.25 for rate in known), f"Keras SGD has the learning rates {known}")


@canary_of(training.adam_hyperparameters)
def _():
    variable, loss = variable_and_loss()
    optimizer = v1.train.AdamOptimizer(0.25, 0.8, 0.9, 1e-3)
    optimizer.minimize(loss)
    numbers = training.adam_hyperparameters(optimizer)
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        values = session.run(numbers)
    given = {"beta1_power": 0.8, "beta2_power": 0.9, "lr": 0.25, "beta1": 0.8, "beta2": 0.9, "epsilon": 1e-3}
    expect(all(np.float32(given[name]) == values[name] for name in given), f"Adam has {values}")


@canary_of(training.scheduled_rate, training.scheduled_rate_at, eagerly=True)
def _():
    expect(training.scheduled_rate(tf.keras.optimizers.SGD(0.25)) is None, "every rate is scheduled")
    schedule = tf.keras.optimizers.schedules.PiecewiseConstantDecay([2], [1.0, 0.5])
    optimizer = tf.keras.optimizers.SGD(schedule)
    expect(isinstance(training.scheduled_rate(optimizer), tf.Variable), "there is no variable of the rate")
    expect(float(training.scheduled_rate_at(optimizer, tf.constant(3))) == 0.5, "the schedule gives something else")


@canary_of(savers.track_part, eagerly=True)
def _():
    owner = tf.Module()
    savers.track_part(owner, tf.Variable(3.0), "part")
    savers.track_part(owner, tf.Variable(4.0), "part", overwrite=True)
    with tempfile.TemporaryDirectory() as folder:
        path = tf.train.Checkpoint(owner=owner).write(f"{folder}/canary")
        value = tf.train.load_checkpoint(path).get_tensor("owner/part/.ATTRIBUTES/VARIABLE_VALUE")
    expect(value == 4.0, "the checkpoint does not hold the part")


@canary_of(savers.delegating_trackable_class, eagerly=True)
def _():
    inner = tf.Module()
    inner.part = tf.Variable(3.0)
    outer = type("Outer", (savers.delegating_trackable_class(), tf.saved_model.Asset), {})(inner)
    with tempfile.TemporaryDirectory() as folder:
        path = tf.train.Checkpoint(owner=outer).write(f"{folder}/canary")
        value = tf.train.load_checkpoint(path).get_tensor("owner/part/.ATTRIBUTES/VARIABLE_VALUE")
    expect(value == 3.0, "the checkpoint is not that of the other object")


@canary_of(training.initialise_in_keras_session)
def _():
    variable, _ = variable_and_loss()
    training.initialise_in_keras_session(variable)
    with v1.Session() as session:
        v1.keras.backend.set_session(session)
        try:
            v1.keras.backend.get_session()
            expect(session.run(v1.is_variable_initialized(variable)), "Keras does not initialise the variable")
        finally:
            v1.keras.backend.set_session(None)


@canary_of(callers.model_in_training, eagerly=True)
def _():
    found = []

    class Watched(legacy.SGD):
        def apply_gradients(self, *arguments, **keywords):
            found.append(callers.model_in_training())
            return super().apply_gradients(*arguments, **keywords)

    model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(1,))])
    model.compile(Watched(0.1), "mse")
    model.train_on_batch(np.ones([1, 1]), np.ones([1, 1]))
    expect(found and all(model is one for one in found), "the model is not found from its optimizer")
    expect(callers.model_in_training() is None, "a model is found where none trains")


@canary_of(callers.is_building_evaluation)
def _():
    found = {}

    def model_fn(features, labels, mode):
        found[mode] = callers.is_building_evaluation()
        step = v1.train.get_or_create_global_step()
        return tf.estimator.EstimatorSpec(mode, loss=tf.constant(0.0), train_op=step.assign_add(1))

    with tempfile.TemporaryDirectory() as folder:
        estimator = tf.estimator.Estimator(model_fn, folder)
        estimator.train(lambda: tf.data.Dataset.from_tensors(0), steps=1)
        estimator.evaluate(lambda: tf.data.Dataset.from_tensors(0), steps=1)
    expect(found == {"train": False, "eval": True}, f"evaluations are distinguished from trainings as {found}")
    expect(not callers.is_building_evaluation(), "a graph is taken for one of an Estimator's")


@canary_of(callers.callbacks_in_training, eagerly=True)
def _():
    found = []
    look = tf.keras.callbacks.LambdaCallback(on_train_begin=lambda logs: found.append(callers.callbacks_in_training()))
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(1,))])
    model.compile("sgd", "mse")
    model.fit(np.ones([1, 1]), np.ones([1, 1]), verbose=0, callbacks=[look])
    expect(look in found[0], "callbacks are not found from one of them")
    expect(callers.callbacks_in_training() == [], "callbacks are found where none trains")


@canary_of(callers.is_called_by_keras, eagerly=True)
def _():
    found = []

    class Watched(tf.distribute.OneDeviceStrategy):
        def experimental_distribute_dataset(self, dataset, options=None):
            found.append(callers.is_called_by_keras())
            return dataset

    strategy = Watched("/cpu:0")
    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(1,))])
        model.compile("sgd", "mse")
    model.fit(np.ones([1, 1]), np.ones([1, 1]), verbose=0)
    strategy.experimental_distribute_dataset(None)
    expect(found == [True, False], f"calls of `fit` and of a script are distinguished as {found}")


@canary_of(callers.is_being_freed)
def _():
    found = []

    class Watched(tf.compat.v1.Session):
        def close(self):
            found.append(callers.is_being_freed(self))
            super().close()

    Watched().close()
    collect_garbage()
    expect(found == [False, True], f"calls of `close` by a script and by Python are distinguished as {found}")


@canary_of(training.is_graph_network, training.steps_per_execution, eagerly=True)
def _():
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(1,))])
    model.compile("sgd", "mse", steps_per_execution=3)
    own = type("Own", (tf.keras.Model,), {})()
    expect(training.is_graph_network(model) and not training.is_graph_network(own), "kinds of models are confused")
    expect(training.steps_per_execution(model) == 3, "the number of steps is another one")
    expect(training.steps_per_execution(own) == 1, "a model that is not compiled has another number")


@canary_of(training.set_dtype_policy, eagerly=True)
def _():
    layer = tf.keras.layers.Dense(1)
    training.set_dtype_policy(layer, "mixed_float16")
    result = layer(np.ones([1, 1], np.float32))
    expect((layer.kernel.dtype, result.dtype) == (tf.float32, tf.float16), "the layer does not follow the policy")


@canary_of(training.warm_start_settings, training.model_function)
def _():
    def model_fn(features, labels, mode):
        raise NotImplementedError

    with tempfile.TemporaryDirectory() as folder:
        settings = tf.estimator.WarmStartSettings(folder)
        estimator = tf.estimator.Estimator(model_fn, folder, warm_start_from=settings)
    expect(training.warm_start_settings(estimator) == settings, "it starts from something else")
    expect(callable(training.model_function(estimator)), "there is no model function")
    expect(callable(getattr(estimator, names.INPUT_OF_ESTIMATOR, None)), f"there is no {names.INPUT_OF_ESTIMATOR}")


@canary_of(names.executes_operators)
def _():
    graph_queue, session = v1.FIFOQueue(4, tf.float32, []), v1.Session()
    taken, put = graph_queue.dequeue(), graph_queue.enqueue(1.0)

    def waits(take, give):
        thread = threading.Thread(target=take)
        thread.start()
        end, found = time.monotonic() + 60, False
        while not found and thread.is_alive() and time.monotonic() < end:
            frame = sys._current_frames().get(thread.ident)
            found = frame is not None and names.executes_operators(frame.f_globals["__name__"], frame.f_code.co_name)
        give()
        thread.join()
        return found

    give = lambda: session.run(put)  # noqa: E731
    expect(waits(lambda: session.run(taken), give), "a run of a session is another function")
    expect(waits(session.make_callable(taken), give), "a call of a session is another function")

    def eagerly():
        queue = tf.queue.FIFOQueue(4, tf.float32, [])
        give = functools.partial(queue.enqueue, 1.0)
        expect(waits(queue.dequeue, give), "an operator is executed in another function")
        expect(waits(tf.function(queue.dequeue), give), "a function is executed in another function")

    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        threads.submit(eagerly).result()  # a thread begins without a graph


@canary_of(training.session_config, training.set_session_config)
def _():
    config = tf.estimator.RunConfig(session_config=v1.ConfigProto())
    changed = v1.ConfigProto(allow_soft_placement=True)
    training.set_session_config(config, changed)
    expect(training.session_config(config) == config.session_config == changed, "the settings did not change")


@canary_of(training.compile_converts_optimizers)
def _():
    expect(not training.compile_converts_optimizers(), "TensorFlow 2 behaviour is off")


@canary_of(training.config_before_training)
def _():
    optimizer = tf.keras.optimizers.SGD(0.25)
    expect(training.config_before_training(optimizer)["learning_rate"] == 0.25, "the rate is another one")
    expect("_serialize_hyperparameter" not in vars(optimizer), "it stays changed")


@canary_of(training.restrict_file_writing)
def _():
    def model(features, labels, mode, config):
        step, v = v1.train.get_or_create_global_step(), v1.get_variable("v", [])
        return tf.estimator.EstimatorSpec(mode, loss=v * v, train_op=v1.assign_add(step, 1))

    kind, left = v1.estimator.Estimator, []
    with kept(kind, "_train_with_estimator_spec"), tempfile.TemporaryDirectory() as folder:
        train = kind._train_with_estimator_spec
        kind._train_with_estimator_spec = getattr(train, "__wrapped__", train)
        training.restrict_file_writing(tf.estimator.RunConfig, lambda: False, lambda: left.append(0))
        config = tf.estimator.RunConfig(log_step_count_steps=1, save_checkpoints_steps=1, save_summary_steps=1)
        estimator = kind(model, folder, config)
        listeners = [v1.train.CheckpointSaverListener()]
        estimator.train(lambda: tf.data.Dataset.from_tensors(1.0).repeat(), steps=2, saving_listeners=listeners)
        expect(not os.listdir(folder), f"it has written {os.listdir(folder)}")
        expect(left == [0], "the end of the training is not seen")
        expect(estimator.config.save_checkpoints_steps == 1, "the configuration is another one afterwards")


@canary_of(savers.set_steps_per_run)
def _():
    with tf.Graph().as_default(), tempfile.TemporaryDirectory() as folder:
        step = v1.train.create_global_step()
        hook = tf.estimator.CheckpointSaverHook(folder, save_steps=100)
        savers.set_steps_per_run(hook, 2)
        asked = []
        context = types.SimpleNamespace(session=types.SimpleNamespace(run=lambda _: asked.append(1) or 0))
        with v1.train.MonitoredSession(hooks=[hook]) as session:
            session.run(step)
            hook.after_run(context, types.SimpleNamespace(results=5))
            expect(not asked, "it asks for the global step although nothing is due")
            hook.after_run(context, types.SimpleNamespace(results=98))
            expect(asked == [1], "it does not ask for the global step when a checkpoint may be due")


@canary_of(training.distribute_config)
def _():
    strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
    config = tf.estimator.RunConfig(experimental_distribute=training.distribute_config(strategy))
    expect(config.train_distribute is strategy and config.eval_distribute is strategy, "there is another strategy")


@canary_of(savers.folder_of_saver_hook)
def _():
    hook = tf.estimator.CheckpointSaverHook("folder", save_steps=1)
    expect(savers.folder_of_saver_hook(hook) == "folder", "it saves to another folder")


@canary_of(savers.listeners_of)
def _():
    hook = tf.estimator.CheckpointSaverHook("folder", save_steps=1, listeners=[v1.train.CheckpointSaverListener()])
    expect(savers.listeners_of(hook), "its listeners are elsewhere")
    hook = tf.estimator.CheckpointSaverHook("folder", save_steps=1)
    expect(not savers.listeners_of(hook), "it has listeners by itself")


@canary_of(savers.bulk_saver_builder)
def _():
    variable_and_loss()
    own = type("Own", (savers.bulk_saver_builder(),), {})()
    with tempfile.TemporaryDirectory() as folder, v1.Session() as session:
        session.run(v1.global_variables_initializer())
        expect(v1.train.Saver(builder=own).save(session, f"{folder}/canary"), "nothing was saved")


@canary_of(training.call_after_gradients)
def _():
    from tensorflow.python.ops import gradients_util

    seen = []
    with kept(gradients_util, "_GradientsHelper"):
        training.call_after_gradients(lambda ys, gradients: seen.append((ys, gradients)))
        variable, loss = variable_and_loss()
        taken = v1.gradients(loss, [variable])
        v1.train.GradientDescentOptimizer(0.1).minimize(loss)
    expect(seen[0][0] is loss and seen[0][1] == taken, "gradients are taken unseen")
    expect(len(seen) == 2 and seen[1][0] is loss, "an optimizer takes gradients unseen")


@canary_of(training.replace_seed_choice)
def _():
    from tensorflow.python.framework import random_seed

    with kept(random_seed, "get_seed"):
        training.replace_seed_choice(lambda get_seed, seed: (7, 11 if seed is None else seed))
        drawn = [v1.random_normal([2]), v1.random_uniform([2], seed=5), v1.get_variable("w", [2]).initializer.inputs[1]]
        dataset = tf.data.Dataset.range(4).shuffle(4)
    seeds = {
        (op.get_attr("seed"), op.get_attr("seed2")) for op in v1.get_default_graph().get_operations() if is_draw(op)
    }
    expect(drawn and seeds == {(7, 11), (7, 5)}, f"operators have the seeds {seeds}")
    expect(dataset is not None, "no data set can be shuffled")


@canary_of(training.seed_unseeded_operators)
def _():
    from tensorflow.python.framework import ops
    from tensorflow.python.ops import image_ops_impl, stateful_random_ops

    modules = (image_ops_impl, stateful_random_ops)
    with kept(ops.Graph, "_create_op_internal"), kept(image_ops_impl, "config"), kept(stateful_random_ops, "config"):
        training.seed_unseeded_operators(7)
        drawn = [tf.raw_ops.RandomUniform(shape=[2], dtype=tf.float32) for _ in range(2)]
        unchanged = tf.raw_ops.RandomUniform(shape=[2], dtype=tf.float32, seed=5)
        refused = [module.config.is_op_determinism_enabled() for module in modules]
    seeds = [(each.op.get_attr("seed"), each.op.get_attr("seed2")) for each in (*drawn, unchanged)]
    expect(seeds[0][0] == seeds[1][0] == 7 and seeds[0] != seeds[1], f"operators have the seeds {seeds}")
    expect(seeds[2] == (5, 0) and not any(refused), "a seed of the script is changed, or modules still refuse")


def is_draw(op):
    return op.type in ("RandomStandardNormal", "RandomUniform", "TruncatedNormal")


@canary_of(training.redirect_estimator_folders)
def _():
    module = importlib.import_module(names.ESTIMATOR_MODULE)
    with kept(module, "maybe_overwrite_model_dir_and_session_config"), tempfile.TemporaryDirectory() as folder:
        training.redirect_estimator_folders(module, lambda folder: f"{folder}/canary")
        estimator = tf.estimator.Estimator(lambda features: None, folder)
        expect(estimator.model_dir == estimator.config.model_dir == f"{folder}/canary", "it writes elsewhere")
    for name in names.KERAS_MODEL_MODULES:
        expect(callable(importlib.import_module(name).Model.fit), f"{name} has no models to fit")


def instance_of(path):
    """Returns an object of a base class by its public name, in a state with all its attributes."""
    made = {
        "tensorflow.compat.v1.Session": lambda: v1.Session(graph=tf.Graph()),
        "tensorflow.compat.v1.train.Optimizer": lambda: v1.train.Optimizer(False, "canary"),
        "tensorflow.keras.optimizers.Optimizer": _built_keras_optimizer,
        "tensorflow.keras.optimizers.legacy.Optimizer": lambda: legacy.SGD(0.1),
        "keras.optimizers.Optimizer": of_keras3.built_optimizer,
        "tensorflow.keras.layers.BatchNormalization": lambda: tf.keras.layers.BatchNormalization(),
        "tensorflow.estimator.Estimator": lambda: tf.estimator.Estimator(lambda features: None, tempfile.gettempdir()),
        "tensorflow.estimator.EstimatorSpec": lambda: tf.estimator.EstimatorSpec("infer", tf.constant(1.0)),
        "tensorflow.estimator.RunConfig": tf.estimator.RunConfig,
        "tensorflow.estimator.CheckpointSaverHook": lambda: tf.estimator.CheckpointSaverHook("/nowhere", save_steps=1),
        "tensorflow.estimator.LoggingTensorHook": _begun_logging_hook,
    }
    return made[path]()


def _built_keras_optimizer():
    optimizer = tf.keras.optimizers.SGD(0.1)
    optimizer.build([tf.Variable(1.0)])
    return optimizer


def _begun_logging_hook():
    with tf.Graph().as_default():
        hook = tf.estimator.LoggingTensorHook({"value": tf.constant(1.0)}, every_n_iter=1)
        hook.begin()
        return hook


@canary_of(savers.keys_in_object_checkpoint, eagerly=True)
def _():
    with tempfile.TemporaryDirectory() as folder:
        path = tf.train.Checkpoint(part=tf.Variable([1.0], name="own")).write(f"{folder}/objects")
        reader = tf.train.load_checkpoint(path)
        keys = savers.keys_in_object_checkpoint(reader)
        expect(reader.get_tensor(keys["own"]) == [1.0], "the variable is not found by its name")
        with tf.Graph().as_default(), v1.Session() as session:
            variable = v1.get_variable("own", [])
            session.run(variable.initializer)
            path = v1.train.Saver([variable]).save(session, f"{folder}/names", write_meta_graph=False)
        expect(savers.keys_in_object_checkpoint(tf.train.load_checkpoint(path)) == {}, "names are taken for objects")


@canary_of(savers.is_restored, savers.names_restored_but_unused, eagerly=True)
def _():
    with tempfile.TemporaryDirectory() as folder:
        path = tf.train.Checkpoint(part=tf.Variable(1.0), more=tf.Variable(2.0)).write(f"{folder}/objects")
        part, other = tf.Variable(0.0), tf.Variable(0.0)
        checkpoint = tf.train.Checkpoint(part=part, other=other)
        checkpoint.read(path)
        expect(savers.is_restored(part) and not savers.is_restored(other), "restored parts are not known")
        expect(savers.names_restored_but_unused(checkpoint) == ["more"], "what is left over is not known")


@canary_of(savers.wrap_restore, savers.key_and_slice_of, savers.variables_by_key)
def _():
    asked, saver_class = [], v1.train.Saver
    with kept(saver_class, "restore"):
        savers.wrap_restore(lambda inner, saver, session, path: asked.append((saver, session, path)))
        plain = v1.get_variable("plain", [2])
        whole = v1.get_variable("whole", [4], partitioner=v1.fixed_size_partitioner(2))
        saver = saver_class({"called": plain})
        saver.restore("session", "path")
    expect(asked == [(saver, "session", "path")], "savers restore by themselves")
    expect(savers.variables_by_key(saver) == {"called": plain}, "a saver does not tell what it was given")
    expect(savers.variables_by_key(saver_class([plain])) is None, "a list is taken for a dictionary")
    expect(savers.key_and_slice_of(plain) == ("plain", ""), "a variable is saved by another name")
    expect(
        [savers.key_and_slice_of(part) for part in whole] == [("whole", "4 0,2"), ("whole", "4 2,2")], "slices differ"
    )


@canary_of(training.hyperparameter_variables)
def _():
    legacy, current = tf.keras.optimizers.legacy.SGD(0.5, momentum=0.9), tf.keras.optimizers.SGD(0.5)
    legacy.apply_gradients([(tf.constant(1.0), v1.get_variable("trained", [], use_resource=True))])
    names = [[variable.op.name for variable in training.hyperparameter_variables(each)] for each in (legacy, current)]
    expect(sorted(names[0]) == ["SGD/decay", "SGD/learning_rate", "SGD/momentum"], f"a legacy optimizer has {names[0]}")
    expect(len(names[1]) == 1 and "learning_rate" in names[1][0], f"an optimizer has {names[1]}")


@canary_of(training.compile_arguments, eagerly=True)
def _():
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(1,))])
    expect(training.compile_arguments(model) == {}, "a model that is not compiled has arguments")
    model.compile("sgd", tf.keras.losses.mse, metrics=["mae"])
    arguments = training.compile_arguments(model)
    expect(arguments["loss"] is tf.keras.losses.mse and arguments["metrics"] == ["mae"], "they are others")


@canary_of(savers.share_event_writer, savers.shared_event_writer)
def _():
    with tempfile.TemporaryDirectory() as folder:
        writer = object()
        expect(savers.shared_event_writer(folder) is None, "a folder has a writer that no code has made")
        savers.share_event_writer(folder, writer)
        expect(savers.shared_event_writer(folder) is writer, "a writer is not kept")
        expect(v1.summary.FileWriterCache.get(folder) is writer, "TensorFlow makes a writer of its own")
        v1.summary.FileWriterCache._cache.pop(folder)


@canary_of(training.is_loss_scaling_mark, eagerly=True)
def _():
    for made in (tf.keras.optimizers.SGD, tf.keras.optimizers.legacy.SGD):
        optimizer = made(0.1)
        before = set(vars(optimizer))
        tf.keras.mixed_precision.LossScaleOptimizer(optimizer)
        marks = [name for name in set(vars(optimizer)) - before if training.is_loss_scaling_mark(name)]
        expect(len(marks) == 1, "Keras' loss scaling sets another attribute on the optimizer inside")
