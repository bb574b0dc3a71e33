"""`tf.contrib.tpu`, `training`, `data`, `learn`, `mixed_precision`, `estimator`, `predictor`; the digits of MNIST."""

from __future__ import annotations

import gzip
import pathlib
import pickle
import tempfile

import numpy as np
import tensorflow.compat.v1 as tf

from tensorflow1_compat import threadpool
from tensorflow1_compat.contrib import cluster_resolver, estimator, learn, opt, predictor, tpu, training
from tensorflow1_compat.contrib.learn.datasets import base, mnist
from tests.tensorflow1_compat.contrib_cases.common import close, error_of, value


def line_fn(params):
    x = np.random.RandomState(0).randn(64, 2).astype(np.float32)
    dataset = tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True)))
    return dataset.repeat().batch(params["batch_size"], drop_remainder=True)


def tpu_model(features, labels, mode, params):
    predictions = tf.layers.dense(features, 1)
    if mode == tf.estimator.ModeKeys.PREDICT:
        return tpu.TPUEstimatorSpec(mode, predictions={"y": predictions})
    loss = tf.losses.mean_squared_error(labels, predictions)
    optimizer = tpu.CrossShardOptimizer(tf.train.GradientDescentOptimizer(0.1))
    train = optimizer.minimize(loss, tf.train.get_global_step())
    metrics = (lambda y, p: {"error": tf.metrics.mean_absolute_error(y, p)}, [labels, predictions])
    scaffold_fn = tf.train.Scaffold
    return tpu.TPUEstimatorSpec(mode, loss=loss, train_op=train, eval_metrics=metrics, scaffold_fn=scaffold_fn)


def case_tpu_estimator_trains():
    with tempfile.TemporaryDirectory() as folder:
        config = tpu.RunConfig(
            model_dir=folder, save_checkpoints_steps=20,
            tpu_config=tpu.TPUConfig(10, num_shards=8, per_host_input_for_training=tpu.InputPipelineConfig.PER_HOST_V2),
        )  # fmt: skip
        model = tpu.TPUEstimator(tpu_model, config=config, use_tpu=True, train_batch_size=8, eval_batch_size=16,
                                 predict_batch_size=4)  # fmt: skip
        model.train(line_fn, max_steps=40)
        found = model.evaluate(line_fn, steps=2)
        assert found["loss"] < 0.05 and found["error"] < 0.3 and found["global_step"] == 40
        assert next(model.predict(line_fn))["y"].shape == (1,)
    with tempfile.TemporaryDirectory() as folder:
        plain = tf.estimator.RunConfig(model_dir=folder, save_checkpoints_steps=7)
        other = tpu.TPUEstimator(tpu_model, config=plain, use_tpu=False, train_batch_size=8)
        assert other.config.save_checkpoints_steps == 7
        other.train(line_fn, max_steps=2)


def case_tpu_operators():
    x = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    assert isinstance(tpu.CrossShardOptimizer(tf.train.AdamOptimizer()), tf.train.Optimizer)
    close(value(tpu.cross_replica_sum(x)), [[1, 2], [3, 4]])
    close(value(tpu.rewrite(lambda a: a + 1, [x]))[0], [[2, 3], [4, 5]])
    close(value(tpu.replicate(lambda a: a * 2, [[x], [x]]))[1][0], [[2, 4], [6, 8]])
    close(value(tpu.shard(lambda a: a * 2, [x], num_shards=2))[0], [[2, 4], [6, 8]])
    close(value(tpu.batch_parallel(lambda a: a * 2, [x]))[0], [[2, 4], [6, 8]])
    value([tpu.initialize_system(), tpu.shutdown_system()])
    with tpu.bfloat16_scope():
        assert tf.layers.dense(tf.ones([2, 3], tf.bfloat16), 4).dtype == tf.bfloat16
    assert cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec({"worker": ["a:1"]})).cluster_spec()


def case_optimizers_outside_of_the_graph():
    point, matrix = tf.Variable([7.0, 7.0]), tf.Variable(tf.ones([2, 3]))
    target = tf.placeholder(tf.float32, [2, 3])
    loss = tf.reduce_sum(tf.square(point)) + tf.reduce_sum(tf.square(matrix - target))
    losses, steps = [], []
    wanted = np.arange(6, dtype=np.float32).reshape(2, 3)

    def minimum(over=loss, callbacks=(None, None), **options):
        optimizer = opt.ScipyOptimizerInterface(over, **options)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            optimizer.minimize(session, {target: wanted}, [over], *callbacks)
            return session.run([point, matrix])

    found = minimum(callbacks=(lambda weights: steps.append(weights.shape), losses.append), options={"maxiter": 50})
    close(found[0], [0, 0], 1e-3)
    close(found[1], wanted, 1e-3)
    assert losses[0] == 98 + np.square(wanted - 1).sum() and losses[-1] < 1e-5 and set(steps) == {(8,)}
    close(minimum(var_list=[point])[1], np.ones([2, 3]))
    bounds = {point: ([1, 2], np.inf), matrix: (-np.inf, [[1], [3]])}
    bounded = minimum(var_to_bounds=bounds)
    close(bounded[0], [1, 2], 1e-3)
    close(bounded[1], np.minimum(wanted, [[1], [3]]), 1e-3)
    constrained = minimum(equalities=[point[1] - 1.0], inequalities=[point[0] - 1.0], method="SLSQP")
    close(constrained[0], [1, 1], 1e-3)
    assert minimum(tf.reduce_sum(tf.square(point)), options={"maxiter": 1})[1].shape == (2, 3)  # no gradient of it
    for name, given in (("bounds", [(0, 1)]), ("jac", False)):
        said = error_of(ValueError, minimum, **{name: given})
        assert said.startswith(f"ScipyOptimizerInterface: {name} is set by this class")


def case_learn():
    config = learn.RunConfig(num_cores=2, model_dir="there", master="local")
    assert config.session_config.inter_op_parallelism_threads == 2 and config.save_checkpoints_secs == 600
    assert learn.RunConfig(save_checkpoints_steps=5).save_checkpoints_secs is None
    assert config.replace(model_dir="here").model_dir == "here" and config.tf_config == config.session_config
    assert learn.ModeKeys.TRAIN == tf.estimator.ModeKeys.TRAIN and learn.ModeKeys.INFER == "infer"
    with tempfile.TemporaryDirectory() as folder:

        def model_fn(features, labels, mode):
            loss = tf.reduce_mean(tf.square(tf.get_variable("w", initializer=3.0) - features))
            train = tf.train.GradientDescentOptimizer(0.1).minimize(loss, tf.train.get_global_step())
            return learn.ModelFnOps(mode, {"f": features}, loss, train)

        model = tf.estimator.Estimator(model_fn, f"{folder}/m")
        feed = lambda: tf.data.Dataset.from_tensors(np.ones(4, np.float32)).repeat(20)  # noqa: E731
        run = lambda _: learn.Experiment(model, feed, feed, train_steps=10, eval_steps=1, eval_delay_secs=0)  # noqa: E731
        metrics, _ = learn.learn_runner.run(run, folder)
        assert metrics["global_step"] == 10 and metrics["loss"] < 1
        assert learn.monitors.replace_monitors_with_hooks([learn.monitors.StopAtStep(1)], model)


def case_learn_loss_and_metrics():
    x, y = np.ones([8, 1], np.float32), np.array([[1], [1], [1], [0]] * 2)
    feed = tf.estimator.inputs.numpy_input_fn({"x": x}, y, 8, shuffle=False)
    metrics = {name: learn.MetricSpec(getattr(tf.metrics, name), "class_ids") for name in ("precision", "recall")}
    metrics["logit"] = learn.MetricSpec(lambda first, second: tf.metrics.mean(first), "logits")
    with tempfile.TemporaryDirectory() as folder:
        columns, rate_1 = [tf.feature_column.numeric_column("x")], tf.train.GradientDescentOptimizer(1.0)
        model = learn.LinearClassifier(columns, folder, optimizer=rate_1)
        experiment = learn.Experiment(model, feed, feed, metrics, train_steps=1, eval_steps=1)
        experiment.train()
        found = experiment.evaluate()
    close([found[key] for key in ("precision", "recall", "logit")], [0.75, 1, 0.5])  # gradients are means over rows


def case_learn_monitors():
    evaluations, saved = [], []

    class Listener(tf.train.CheckpointSaverListener):
        def after_save(self, session, global_step_value):
            saved.append(global_step_value)

    def model_fn(features, labels, mode):
        loss = tf.get_variable("w", initializer=3.0) + tf.reduce_sum(features)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=tf.assign_add(tf.train.get_global_step(), 1))

    def feed():
        return tf.data.Dataset.from_tensors(np.ones(1, np.float32)).repeat(100)

    def evaluation_feed():
        evaluations.append(1)
        return feed()

    def experiment(folder, *monitors, **options):
        model = tf.estimator.Estimator(model_fn, config=learn.RunConfig(model_dir=folder, save_checkpoints_steps=20))
        return learn.Experiment(model, feed, evaluation_feed, None, 60, 1, monitors, **options)

    def monitor(**options):
        return learn.monitors.ValidationMonitor(
            input_fn=evaluation_feed, eval_steps=1, every_n_steps=5, early_stopping_rounds=30, **options
        )

    with tempfile.TemporaryDirectory() as folder:
        experiment(folder, monitor()).train()
        assert tf.train.latest_checkpoint(folder).endswith("ckpt-40") and len(evaluations) == 3
    with tempfile.TemporaryDirectory() as folder:
        said = error_of(ValueError, experiment(folder, monitor(early_stopping_metric="accuracy")).train)
    assert said == "ValidationMonitor: 'accuracy' is no metric of the evaluation, which has global_step, loss."
    for frequency, times in ((None, 3), (0, 1)):
        evaluations.clear(), saved.clear()
        with tempfile.TemporaryDirectory() as folder:
            experiment(folder, min_eval_frequency=frequency, saving_listeners=[Listener()]).train_and_evaluate()
        assert len(evaluations) == times and saved == [0, 20, 40, 60]


def case_learn_reads_lines():
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "rows.csv").write_text("1,2\n3,4\n")
        lines = learn.read_batch_examples(f"{folder}/*.csv", 2, tf.TextLineReader, randomize_input=False)
        assert value(lines).tolist() == [b"1,2", b"3,4"]
    said = error_of(ValueError, learn.read_batch_examples, "*.csv", 2, tf.WholeFileReader)
    assert "Expected tf.TFRecordReader or tf.TextLineReader." in said


def gz(path, header, array):
    with gzip.open(path, "wb") as file:
        file.write(np.array(header, ">u4").tobytes() + array.tobytes())


def case_digits():
    images, labels = np.arange(6 * 28 * 28).astype(np.uint8).reshape(6, 28, 28), np.arange(6, dtype=np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        for part, count in (("train", 6), ("t10k", 2)):
            gz(pathlib.Path(folder, f"{part}-images-idx3-ubyte.gz"), [2051, count, 28, 28], images[:count])
            gz(pathlib.Path(folder, f"{part}-labels-idx1-ubyte.gz"), [2049, count], labels[:count])
        digits = mnist.read_data_sets(folder, one_hot=True, validation_size=2)
        plain = mnist.read_data_sets(folder, reshape=False, validation_size=0, dtype=tf.uint8)
    assert isinstance(digits, base.Datasets) and digits.train.num_examples == 4 and digits.test.labels.shape == (2, 10)
    close(digits.validation.images, images[:2].reshape(2, 784) / 255)
    assert plain.train.images.shape == (6, 28, 28, 1) and plain.train.labels.tolist() == [*range(6)]
    seen = [digits.train.next_batch(3) for _ in range(4)]
    assert all(x.shape == (3, 784) and y.shape == (3, 10) for x, y in seen)
    assert digits.train.epochs_completed == 2
    epoch = np.concatenate([y for _, y in seen])[:4].argmax(1)
    assert sorted(epoch) == [2, 3, 4, 5]
    assert len(mnist.DataSet([], [], fake_data=True, one_hot=True).next_batch(2)[0][0]) == 784


def case_digits_follow_the_seed_of_the_graph():
    images, labels = np.zeros((6, 2, 2, 1), np.uint8), np.arange(6)
    tf.set_random_seed(3)
    for seed, first, second in ((None, [3, 5, 4, 1], [5, 1, 3, 4]), (5, [5, 2, 4, 1], [2, 3, 0, 5])):  # those of 1.15
        one, other = (mnist.DataSet(images, labels, seed=seed) for _ in range(2))
        assert np.concatenate([one.next_batch(4)[1] for _ in range(3)]).tolist()[:4] == first
        assert other.next_batch(4)[1].tolist() == second


def case_estimator_and_predictor():
    weights = tf.get_variable("w", initializer=[3.0, 4.0])
    clipped = estimator.clip_gradients_by_norm(tf.train.GradientDescentOptimizer(1.0), 1.0)
    train = clipped.minimize(tf.reduce_sum(tf.square(weights)))
    doubled = tf.identity(tf.placeholder(tf.float32, [2], name="x") * weights, name="y")
    with tempfile.TemporaryDirectory() as folder, tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(train)
        close(session.run(weights), [3 - 0.6, 4 - 0.8])
        given = session.graph.get_tensor_by_name("x:0")
        tf.saved_model.simple_save(session, f"{folder}/m", {"x": given}, {"y": doubled})
        run = predictor.from_saved_model(f"{folder}/m")
        close(run({"x": [1, 2]})["y"], [2.4, 6.4])
        run.session.close()
    assert estimator.TowerOptimizer(lambda: 3) == 3 and estimator.replicate_model_fn(case_learn) is case_learn


def case_decay_of_chosen_variables():
    decayed, other = (tf.get_variable(name, initializer=1.0) for name in ("decayed", "other"))
    optimizer = opt.MomentumWOptimizer(0.5, 0.0, 0.0)
    train = optimizer.minimize(decayed + other, decay_var_list=[decayed])
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(train)
        assert session.run([decayed, other]) == [0.5, 1.0]


def case_hparams_and_threads():
    hparams = training.HParams(rate=0.1, layers=[1, 2], flag=True)
    assert not hparams.parse("flag=0").flag and hparams.parse("flag=1").flag
    assert pickle.loads(pickle.dumps(hparams)).to_json(sort_keys=True) == hparams.to_json(sort_keys=True)
    limited = threadpool.override_threadpool(tf.data.Dataset.range(3), threadpool.PrivateThreadPool(2))
    assert value(tf.data.make_one_shot_iterator(limited).get_next()) == 0
