"""What Keras of TensorFlow 1.15 computed: losses, names of variables, optimizers, images."""

from __future__ import annotations

import importlib
import pathlib
import tempfile

import h5py
import numpy as np
import tensorflow.compat.v1 as tf

from npu_bridge.base.tf_internals.names import KERAS
from tensorflow1_compat import old_attributes, old_keras_rules, proxies
from tests.tensorflow1_compat.contrib_cases.common import close, names, value


def case_cross_entropies_take_logits_of_their_own_activation_only():
    old_keras_rules.restore_keras_of_1()
    keras = tf.keras
    x, labels = tf.constant([[2.0, -1.0]]), np.array([[1.0, 0.0]])
    for activation, other, expected in (
        ("softmax", keras.losses.binary_crossentropy, [0.048587]),
        ("sigmoid", keras.losses.categorical_crossentropy, [0.266463]),
        ("softmax", keras.losses.categorical_crossentropy, [0.048587]),
        ("sigmoid", keras.losses.binary_crossentropy, [0.220095]),
    ):
        output = keras.layers.Activation(activation)(x)
        close(value(other(tf.constant(labels, tf.float32), output)), expected)


def case_a_softmax_of_pixels_is_clipped_before_its_logarithm():
    old_keras_rules.restore_keras_of_1()
    layers = tf.keras.layers
    for shape, layer, expected in (
        ([1, 2], layers.Activation("softmax"), 50.0),
        ([1, 1, 1, 2], layers.Activation("softmax"), -np.log(1e-7)),
        ([1, 1, 1, 2], layers.Softmax(), 50.0),
    ):
        output, labels = layer(tf.reshape([50.0, 0.0], shape)), tf.reshape([0.0, 1.0], shape)
        close(value(tf.keras.losses.categorical_crossentropy(labels, output)), expected)


def case_variables_of_keras_layers_have_the_names_of_1_15():
    old_keras_rules.restore_keras_of_1()
    layers = tf.keras.layers
    cells = [layers.LSTMCell(2), layers.GRUCell(2)]
    for layer in (layers.LSTM(2), layers.RNN(cells, name="pair"), layers.Bidirectional(layers.GRU(2), name="two")):
        layer(tf.ones([1, 3, 4]))
    layers.ConvLSTM2D(2, 3)(tf.ones([1, 2, 4, 4, 1]))
    kernels = [name for name in names() if "/kernel" in name]
    assert kernels == [
        "conv_lst_m2d/kernel", "lstm/kernel", "pair/kernel", "pair/kernel_1", "two/backward_gru/kernel",
        "two/forward_gru/kernel",
    ]  # fmt: skip
    for base in (layers.Layer, tf.layers.Layer):
        assert type("VGG16", (base,), {})().name.startswith("vg_g16")


def case_the_loss_of_a_masked_sequence_is_a_mean_over_all_elements():
    old_keras_rules.restore_keras_of_1()
    layers = tf.keras.layers
    model = tf.keras.Sequential([layers.Masking(input_shape=(4, 1)), layers.Dense(1, kernel_initializer="ones")])
    for weights, expected in ((None, (1 + 4) / 4), (np.array([[2.0, 1, 1, 1]]), (2 + 4) / 4)):
        model.compile("sgd", "mse", sample_weight_mode="temporal")
        x, y = np.array([[[1.0], [2], [0], [0]]]), np.zeros([1, 4, 1])
        close(model.evaluate(x, y, sample_weight=weights, verbose=0), expected)


def case_decoded_sequences_are_as_long_as_the_longest():
    old_keras_rules.restore_keras_of_1()
    outputs = tf.one_hot([[0, 0, 2, 1, 2], [2, 1, 2, 2, 2]], 3)
    for is_greedy in (True, False):
        (found,), _ = importlib.import_module(f"{KERAS}.src.backend").ctc_decode(outputs, [5, 5], is_greedy)
        close(value(found), [[0, 1], [1, -1]])


def case_a_layer_names_the_inputs_of_its_updates():
    class Counter(tf.keras.layers.Layer):
        def build(self, shape):
            self.count = self.add_weight("count", (), initializer="zeros", trainable=False)
            super().build(shape)

        def call(self, inputs):
            self.add_loss(tf.reduce_mean(inputs), inputs)
            self.add_update([self.count.assign_add(1.0)], inputs)
            return inputs

    old_attributes.add_attributes_of_2()
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(1,)), Counter()])
    model.compile("sgd", "mse")
    model.fit(np.ones([4, 1]), np.ones([4, 1]), batch_size=1, verbose=0)
    assert model.layers[1].get_weights() == [4.0] and len(model.losses) == 1


def case_a_shift_of_the_height_moves_rows():
    old_keras_rules.restore_keras_of_1()
    images = tf.keras.preprocessing.image
    generator, image = images.ImageDataGenerator(), np.arange(12.0).reshape(4, 3, 1)
    for step, expected in (({"tx": 1}, image[[1, 2, 3, 3]]), ({"ty": 1}, image[:, [1, 2, 2]])):
        close(generator.apply_transform(image, step), expected)
    close(generator.apply_transform(image, {"zx": 0.5})[:, 0, 0], [3.75, 5.25, 6.75, 8.25])


def case_cosine_similarity_is_positive_as_a_loss_too():
    old_keras_rules.restore_keras_of_1()
    model = tf.keras.Sequential([tf.keras.layers.Dense(2, input_shape=(2,), kernel_initializer="ones")])
    for loss in ("cosine_proximity", tf.keras.losses.CosineSimilarity()):
        model.compile("sgd", loss, metrics=["cosine_proximity"])
        assert model.metrics_names == ["loss", "cosine_proximity"]
        close(model.evaluate(np.ones([1, 2]), np.array([[1.0, 0.0]]), verbose=0), [0.5**0.5] * 2)


def case_the_text_adagrad_starts_its_sums_at_0():
    old_keras_rules.restore_keras_of_1()
    starts = [
        tf.keras.optimizers.get(kind).get_config()["initial_accumulator_value"]
        for kind in ("adagrad", {"class_name": "Adagrad", "config": {}}, tf.keras.optimizers.Adagrad())
    ]
    close(starts, [0.0, 0.0, 0.1])


def case_convolutions_of_single_channels_take_strides_and_dilation():
    old_keras_rules.restore_keras_of_1()
    image = tf.reshape(tf.range(128.0), [1, 8, 8, 2])
    depthwise = tf.keras.layers.DepthwiseConv2D(3, 2, "same", dilation_rate=2, depthwise_initializer="ones")(image)
    separable = tf.layers.separable_conv2d(image, 3, 3, 2, "same", dilation_rate=2)
    # The strides are those of every second pixel, as in 1.15.
    dilated = tf.nn.depthwise_conv2d(image, tf.ones([3, 3, 2, 1]), [1] * 4, "SAME", [2, 2])
    close(*value([depthwise, tf.gather(tf.gather(dilated, [0, 1, 4, 5], axis=1), [0, 1, 4, 5], axis=2)]))
    assert separable.shape.as_list() == [1, 4, 4, 3]


def case_models_and_weights_are_saved_as_hdf5_whatever_the_ending():
    old_keras_rules.restore_keras_of_1()
    keras, x = tf.keras, np.ones([2, 2])
    model = keras.Sequential([keras.layers.Dense(1, input_shape=(2,))])
    model.compile("sgd", "mse")
    with tempfile.TemporaryDirectory() as folder:
        whole, weights = (str(pathlib.Path(folder) / name) for name in ("best.keras", "best.weights.h5"))
        saving = [keras.callbacks.ModelCheckpoint(path, save_weights_only=path == weights) for path in (whole, weights)]
        model.fit(x, x[:, :1], callbacks=saving, verbose=0)
        assert h5py.is_hdf5(whole) and "dense" in h5py.File(weights)
        loaded = keras.models.load_model(whole)
        close(loaded.predict(x), model.predict(x))
        model.set_weights([np.zeros_like(each) for each in model.get_weights()])
        model.load_weights(weights, by_name=True)
    close(loaded.predict(x), model.predict(x))


# The first step of each optimizer, with a gradient of 1.
OLD = {"Adadelta": 1.0 * (1e-7 / 0.05) ** 0.5, "Adagrad": 0.01, "Adamax": 0.002, "Nadam": 0.002 * 1.056463}
STEPS = {
    "keras": {**OLD, "Adam": 0.001, "RMSprop": 0.001 / 0.1**0.5, "SGD": 0.01},
    "tensorflow.python.keras": OLD,
    "tensorflow.keras": {"Adadelta": 0.001 * (1e-7 / 0.05) ** 0.5, "Adagrad": 0.001 / 1.1**0.5, "Adamax": 0.001},
}


def case_optimizers_have_the_defaults_of_the_module_that_they_come_from():
    for root, steps in STEPS.items():
        optimizers = proxies.proxy(f"{root}.optimizers")
        for name, expected in steps.items():
            made = [getattr(optimizers, name)()]
            made += [getattr(optimizers, name.lower())()] if root != "tensorflow.keras" else []
            if root == "keras":
                made += [optimizers.get(name.lower()), optimizers.deserialize({"class_name": name, "config": {}})]
            for optimizer in made:
                assert isinstance(optimizer, optimizers.Optimizer) and issubclass(type(optimizer), optimizers.Optimizer)
                weight = tf.Variable([1.0], use_resource=True)
                trained = optimizer.get_updates(tf.reduce_sum(weight), [weight])
                with tf.Session() as session:
                    session.run(tf.global_variables_initializer())
                    session.run(trained)
                    close(session.run(1 - weight), [expected], 1e-6)
        assert isinstance(optimizers.Adagrad(0.5), tf.keras.optimizers.Adagrad)
        close(value(optimizers.Adadelta(lr=0.5).lr), 0.5)


def case_stand_alone_keras_clips_all_gradients_together():
    weights = [tf.Variable([1.0], use_resource=True), tf.Variable([1.0], use_resource=True)]
    saved = {"class_name": "SGD", "config": {"learning_rate": 1.0, "clipnorm": 0.5}}  # as Keras 2.3.1 writes it
    for optimizer, expected in (
        (proxies.proxy("keras.optimizers").SGD(1.0, clipnorm=0.5), [[0.7, 0.6]] * 2),
        (proxies.proxy("keras.optimizers").deserialize(saved), [[0.7, 0.6]] * 2),
        (proxies.proxy("tensorflow.python.keras.optimizers").SGD(1.0, clipnorm=0.5), [[0.5, 0.5]] * 2),
    ):
        trained = optimizer.get_updates(3 * weights[0] + 4 * weights[1], weights)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(trained)
            close(session.run(weights), np.transpose([expected[0]]))


def case_an_optimizer_of_the_scripts_own_has_get_updates():
    for root in ("keras", "tensorflow.python.keras"):

        class Plain(proxies.proxy(f"{root}.optimizers").Optimizer):
            def __init__(self, lr, **options):
                super().__init__(**options)
                self.lr, self.updates = tf.keras.backend.variable(lr), []

            def get_updates(self, loss, params):
                pairs = zip(params, self.get_gradients(loss, params))
                self.updates = [tf.keras.backend.update_sub(param, self.lr * grad) for param, grad in pairs]
                return self.updates

        assert isinstance(Plain(0.1), proxies.proxy(f"{root}.optimizers").Optimizer)
        assert not isinstance(tf.keras.optimizers.SGD(), Plain)
        model = tf.keras.Sequential([tf.keras.layers.Dense(1, "linear", False, "zeros", input_shape=(1,))])
        model.compile(Plain(0.25, clipvalue=1.0), "mse")
        model.fit(np.ones([2, 1]), np.ones([2, 1]), verbose=0)
        close(model.get_weights(), [[[0.25]]])


def case_old_homes_of_names_of_keras():
    old_keras_rules.restore_keras_of_1()
    keras = proxies.proxy("keras")
    saving = keras.engine.saving
    model, other = (keras.Sequential([keras.layers.Dense(1, input_shape=(2,), name="d")]) for _ in range(2))
    with h5py.File("weights", "w", driver="core", backing_store=False) as file:
        saving.save_weights_to_hdf5_group(file, model.layers)
        for load in (saving.load_weights_from_hdf5_group, saving.load_weights_from_hdf5_group_by_name):
            other.set_weights([np.zeros([2, 1]), np.ones([1])])
            load(file, filter(None, other.layers))
            close(other.get_weights()[0], model.get_weights()[0])
    assert keras.objectives.binary_crossentropy is keras.losses.binary_crossentropy
    assert keras.backend.tf is proxies.proxy("tensorflow") is keras.backend.tensorflow_backend.tf
    assert keras.backend.tensorflow_backend._get_available_gpus() == []
    close(value(keras.backend.tensorflow_backend._to_tensor(1, tf.float32)), 1)
    interfaces = proxies.proxy("keras.legacy").value_of_import("interfaces")
    assert interfaces.legacy_get_updates_support(len) is len
    assert keras.optimizers.TFOptimizer(tf.train.GradientDescentOptimizer(0.1)).optimizer


def case_stand_alone_keras_logs_accuracy_and_gives_callbacks_the_validation_data():
    keras, seen = proxies.proxy("keras"), []

    class Seen(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append((self.validation_data, logs))

    model = keras.Sequential([keras.layers.Dense(1, "sigmoid", input_shape=(2,))])
    model.compile("sgd", "binary_crossentropy", metrics=["accuracy"])
    x, y = np.eye(4, 2), np.ones([4, 1])
    history = model.fit(x, y, verbose=0, validation_split=0.25, callbacks=[Seen()]).history
    model.fit(x, y, verbose=0, validation_data=(x, y, np.full(4, 0.5)), callbacks=[Seen()])
    model.fit_generator(iter([(x, y)] * 3), 1, 1, verbose=0, validation_data=(x, y), callbacks=[Seen()])
    for (data, logs), weight in zip(seen, (1.0, 0.5, 1.0), strict=True):
        assert logs["acc"] == logs["accuracy"] and logs["val_acc"] == logs["val_accuracy"]
        close(data[1], 1.0)
        close(data[2], weight)
    assert [len(data[0]) for data, _ in seen] == [1, 4, 4] and history["accuracy"] == history["acc"]
