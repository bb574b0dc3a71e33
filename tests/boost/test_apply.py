"""`boost.apply`: what a level and a dictionary make of models and optimizers, what they refuse, and what is said."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import amp, boost, collective, stages
from npu_bridge.boost.subspace_model import make_basis
from npu_bridge.boost.thinning import with_cosine_head
from npu_bridge.estimator.npu.npu_loss_scale_manager import FixedLossScaleManager
from npu_bridge.gradients import AllReduce
from tests.refusing import refuses

tf1 = tf.compat.v1
layers = tf.keras.layers


def residual_model():
    tf.keras.utils.set_random_seed(1)
    image = tf.keras.Input([4, 4, 3])
    x = layers.ReLU()(layers.Conv2D(4, 1)(image))
    y = layers.ReLU()(layers.BatchNormalization(name="inner")(layers.Conv2D(4, 3, padding="same")(x)))
    y = layers.BatchNormalization(name="last")(layers.Conv2D(4, 3, padding="same")(y))
    x = layers.GlobalAveragePooling2D()(layers.ReLU()(layers.Add()([x, y])))
    return tf.keras.Model(image, layers.Dense(2, activation="softmax", name="classes")(x))


def batch():
    random = np.random.default_rng(0)
    return random.normal(size=(8, 4, 4, 3)).astype(np.float32), np.arange(8) % 2


def compiled(model=None, optimizer=None):
    model = model or residual_model()
    model.compile(
        optimizer or tf.keras.optimizers.SGD(0.1), loss="sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return model


def compiled_in_float16():
    tf.keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        return compiled()
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")


def manual(*features, **sections):
    return {"boost": {"mode": "manual", **dict.fromkeys(features, True)}, **sections}


def test_a_model_at_level_1(capsys):
    model = compiled()
    model.fit(*batch(), batch_size=4, verbose=0)  # so that its optimizer knows its variables
    made = boost.apply(model, "O1", {"grad_freeze": {"param_groups": 3}})
    assert [layer.name for layer in made.layers if isinstance(layer, layers.BatchNormalization)] == ["last"]
    head = made.get_layer("classes")
    assert isinstance(head, boost.CosineHead) and head.activation is tf.keras.activations.softmax
    np.testing.assert_array_equal(head.kernel, model.get_layer("classes").kernel)
    said = stages.explain(made.optimizer)
    assert "Freeze" in said and "CentralizeGradients" in said and "cosine_kernel" in said
    printed = capsys.readouterr().out.splitlines()
    assert printed == [
        "boost O1: less_bn: 1 of 2 batch normalisations removed",
        "boost O1: less_bn, fn_flag: classes compares by angles now, without its bias",
        "boost O1: less_bn, gc_flag: gradients of kernels are centralised",
        "boost O1: grad_freeze: 3 groups, interval; 70% of the updates train all layers",
    ]
    history = made.fit(*batch(), batch_size=4, epochs=2, verbose=0).history
    assert set(history) == {"loss", "accuracy"} and np.all(np.isfinite(history["loss"]))


@pytest.mark.parametrize("config, said", [({}, "not built"), ({"grad_freeze": {"param_groups": 2}}, "2 groups")])
def test_a_model_that_is_not_built_yet(config, said, capsys):
    model = tf.keras.Sequential([layers.Dense(4) for _ in range(4)])
    model.compile("sgd", "mse")
    made = boost.apply(model, "O1", config)
    assert said in capsys.readouterr().out.partition("boost O1: grad_freeze: ")[2].partition("\n")[0]
    assert np.isfinite(made.fit(np.ones([4, 2]), np.ones([4, 4]), verbose=0).history["loss"]).all()


def test_draws_of_freezing_are_the_same_on_every_rank_and_in_every_run():
    """They come from a generator with a seed, not from that of the process."""
    made = []
    for seed in (1, 2):
        tf.keras.utils.set_random_seed(seed)
        optimizer = boost.apply(tf.keras.optimizers.SGD(0.1), config=manual("grad_freeze"))
        made.append(optimizer.get_config()["stages"])
    assert made[0] == made[1] and "seed" in str(made[0])


@pytest.mark.parametrize("kind", ["legacy", "current", "tf1"])
def test_optimizers_of_each_kind(graph, kind, capsys):
    config = manual("less_bn", "grad_accumulation", grad_accumulation={"grad_accumulation_step": 2})
    given = {
        "legacy": tf.keras.optimizers.legacy.SGD,
        "current": tf.keras.optimizers.SGD,
        "tf1": tf1.train.GradientDescentOptimizer,
    }[kind](0.1)
    made = boost.apply(given, config=config, loss_scale_manager=FixedLossScaleManager(8.0))
    text = stages.explain(made)
    assert all(name in text for name in ("LossScaling", "Accumulate(steps=2", "CentralizeGradients", "AllReduce"))
    assert isinstance(made, tf1.train.Optimizer if kind == "tf1" else type(given).__mro__[1])
    assert "less_bn: the model is not known here; call boost.less_batch_norm" in capsys.readouterr().out


def test_in_mixed_float16_the_optimizer_that_compile_was_given_is_boosted():
    made = boost.apply(
        compiled_in_float16(), "O1", {"grad_freeze": {"param_groups": 3}}, loss_scale_manager=FixedLossScaleManager(8.0)
    )
    made.fit(*batch(), batch_size=4, verbose=0)
    assert int(made.optimizer.iterations) == 2 and float(made.optimizer.loss_scale) == 8.0


def test_level_0_only_averages(capsys):
    made = boost.apply(tf.keras.optimizers.SGD(0.1), "O0", manual("grad_freeze"))
    assert stages.explain(made).splitlines()[0].split()[1:3] == ["reduce", "AllReduce()"]
    assert "boost.grad_freeze = True has no effect, because the level is O0" in capsys.readouterr().out


def test_keys_without_effect_are_said(capsys):
    config = {"boost": {"adasum": True}, "grad_accumulation": {"grad_accumulation_step": 4}}
    config["common"] = {"device_number": 4}
    boost.apply(tf.keras.optimizers.SGD(0.1), "O0", config)
    printed = capsys.readouterr().out
    assert "boost.adasum = True has no effect, because the mode is 'auto'" in printed
    assert "grad_accumulation.grad_accumulation_step = 4 has no effect, because grad_accumulation is off" in printed
    assert "common.device_number = 4 has no effect, because adasum is off" in printed


@pytest.mark.parametrize("other", ["grad_freeze", "adasum", "grad_accumulation"])
def test_dim_reduce_excludes_the_others(other):
    with pytest.raises(ValueError, match=f"got dim_reduce and {other}. Turn off dim_reduce, or {other}"):
        boost.apply(compiled(), config=manual("dim_reduce", other))


@pytest.mark.parametrize("path", ["pca_mat_path", "weight_load_dir"])
def test_enable_all_keeps_dim_reduce_where_one_of_its_paths_is_given(path, tmp_path):
    """It looks for checkpoints in the folder, or for a basis, and nothing is there."""
    config = {"boost": {"mode": "enable_all"}, "less_bn": {"fn_flag": False}, "dim_reduce": {path: str(tmp_path)}}
    with pytest.raises((OSError, ValueError), match=str(tmp_path)):
        boost.apply(compiled(), config=config)


def test_enable_all_leaves_out_what_cannot_be(capsys):
    config = {"boost": {"mode": "enable_all"}, "less_bn": {"fn_flag": False}}
    made = boost.apply(compiled(), config=config)
    printed = capsys.readouterr().out
    for text in (
        "dim_reduce: left out, because neither pca_mat_path nor weight_load_dir is given",
        "loss_scale_group: left out, because no GroupLossScaleManager is given",
        "grad_accumulation: left out, because grad_accumulation_step is 1",
        "adasum: left out, because it needs 2, 4, 8... times device_number=8 ranks, and there is 1",
        "grad_freeze: left out, because the model has too few layers for so many groups",
    ):
        assert text in printed
    assert "CentralizeGradients" in stages.explain(made.optimizer) and "Freeze" not in stages.explain(made.optimizer)
    with pytest.raises(ValueError, match="at least one block for each group"):
        boost.apply(compiled(), config={"grad_freeze": {"param_groups": 10}})


@refuses(
    (residual_model, {}, ValueError, ["the model has no optimizer", "Call model.compile first"]),
    (lambda: 3, {}, TypeError, "Expected a model of Keras 2 or an optimizer; got 3 (int)"),
    (lambda: tf.keras.optimizers.SGD(), {"config": manual("dim_reduce")}, ValueError, "evaluates the loss"),
    (compiled, {"config": manual("dim_reduce")}, ValueError, "dim_reduce has no basis"),
    (compiled, {"config": manual("loss_scale_group")}, ValueError, "needs the groups"),
    (compiled_in_float16, {}, ValueError, ["mixed_float16", "Expected a loss_scale_manager; got None"]),
)
def test_what_is_refused(what, arguments):
    boost.apply(what(), **arguments)


def keep_checkpoints(model, folder, count, data=None):
    for number in range(count):
        model.fit(*(data or batch()), batch_size=4, verbose=0)
        tf.train.Checkpoint(model=model).write(str(folder / f"weights_{number}"))


@pytest.mark.slow("a training for each folder")
def test_a_basis_has_a_folder_of_its_own_and_is_found_where_it_was_kept_before(tmp_path):
    model = compiled()
    keep_checkpoints(model, tmp_path, 3)
    settings = {"pca_mat_path": None, "weight_load_dir": str(tmp_path), "n_components": 2, "timeout": 1}
    users = sorted(tmp_path.iterdir())
    rows = make_basis(settings, model.trainable_variables).rows
    assert sorted(tmp_path.iterdir()) == sorted([*users, tmp_path / "pca_basis"])
    for path in list((tmp_path / "pca_basis").iterdir()):
        path.rename(tmp_path / path.name) if path.name.startswith("pca_basis_") else path.unlink()
    (tmp_path / "pca_basis").rmdir()
    np.testing.assert_array_equal(make_basis(settings, model.trainable_variables).rows, rows)
    assert not (tmp_path / "pca_basis").exists()
    for path in tmp_path.glob("pca_basis_*"):
        path.unlink()
    (tmp_path / "pca_basis").mkdir()
    (tmp_path / "pca_basis" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"dim_reduce: .*pca_basis holds 'notes.txt', which boost did not make"):
        make_basis(settings, model.trainable_variables)


def test_gradients_are_not_said_to_be_centralised_under_dim_reduce(tmp_path, capsys):
    np.save(tmp_path / "basis.npy", np.eye(1, 26))
    sections = {"less_bn": {"fn_flag": False}, "dim_reduce": {"pca_mat_path": str(tmp_path / "basis.npy")}}
    boost.apply(small_model(), config=manual("less_bn", "dim_reduce", **sections))
    printed = capsys.readouterr().out
    assert "less_bn, gc_flag: left out, because dim_reduce makes the updates" in printed
    assert "centralised" not in printed and "steps along 1 directions" in printed


@pytest.mark.slow("a whole training; its steps are compared with numpy by test_subspace_newton.py")
def test_dim_reduce_trains_a_model_from_a_basis_of_its_checkpoints(tmp_path, capsys):
    model = compiled()
    keep_checkpoints(model, tmp_path, 4)
    config = manual("dim_reduce", dim_reduce={"n_components": 3, "weight_load_dir": str(tmp_path)})
    made = boost.apply(model, config=config)
    assert made is model and "steps along 3 directions" in capsys.readouterr().out
    (basis,) = tmp_path.glob("pca_basis/pca_basis_*.npy")
    moving = model.get_layer("last").moving_mean.numpy()
    before = [variable.numpy() for variable in model.trainable_variables]
    result = made.train_on_batch(*batch(), return_dict=True)
    assert set(result) == {"loss", "accuracy"} and int(model.optimizer.iterations) > 0
    assert any(not np.array_equal(old, new) for old, new in zip(before, model.trainable_variables))
    # One forward pass counts for moving statistics, though the loss was evaluated more often.
    momentum = model.get_layer("last").momentum
    assert np.all(np.abs(model.get_layer("last").moving_mean - moving) < (1 - momentum) * 10)
    history = made.fit(*batch(), batch_size=4, epochs=3, verbose=0).history
    assert np.all(np.isfinite(history["loss"]))
    saved = tf.train.Checkpoint(model=model).write(str(tmp_path / "after"))
    assert any("inverse_hessian" in name for name, _ in tf.train.list_variables(saved))
    time_of_basis = basis.stat().st_mtime_ns
    boost.apply(compiled(model), config=config)
    assert basis.stat().st_mtime_ns == time_of_basis, "a basis of the same checkpoints is computed once"
    made = boost.apply(compiled(model), "O0")
    assert made is model and not hasattr(made, "subspace_newton")
    assert made.train_step.__func__ is tf.keras.Model.train_step


def test_loss_scale_group_takes_a_manager_of_groups(capsys):
    amp = pytest.importorskip("npu_bridge.amp")
    manager = amp.GroupLossScaleManager(["conv", "classes|batch_norm|last|inner"], init=64.0)
    made = boost.apply(compiled(), config=manual("loss_scale_group"), loss_scale_manager=manager)
    assert "a loss scale for each group, by GroupLossScaleManager" in capsys.readouterr().out
    assert "Scaling" in stages.explain(made.optimizer)


def test_gradient_split_groups_cut_where_parameters_begin(capsys):
    """Of this optimizer, not of the next one in the same process."""

    def cut(optimizer):
        (stage,) = (stage for stage in make_stages(optimizer) if isinstance(stage, AllReduce))
        return stage.split_strategy().split([4] * 5)

    def make_stages(optimizer):
        return optimizer.backward_passes.pipeline.stages

    starts, usual = [[0], [1, 2], [3, 4]], [[0, 1, 2, 3, 4]]
    config = {"boost": {"mode": "disable_all"}, "common": {"gradient_split_groups": [2, 4, 50]}}
    made = boost.apply(tf.keras.optimizers.SGD(0.1), config=config)
    assert "fragments begin at the parameters 2, 4, 50" in capsys.readouterr().out
    assert cut(made) == cut(type(made).from_config(made.get_config())) == starts
    assert cut(boost.apply(tf.keras.optimizers.SGD(0.1), config={"boost": {"mode": "disable_all"}})) == usual
    assert cut(boost.apply(tf.compat.v1.train.GradientDescentOptimizer(0.1), config=config)) == starts
    by_level = amp.configure("O0", tf.keras.optimizers.SGD(0.1), gradient_split_groups=list(np.array([2, 4])))
    assert cut(by_level.optimizer) == starts


def test_cosine_head_is_what_numpy_computes():
    random = np.random.default_rng(0)
    inputs = random.normal(size=(5, 7)).astype(np.float32)
    head = boost.CosineHead(3, activation="relu", multiplier=4.0)
    outputs = head(inputs)
    kernel = head.kernel.numpy()
    cosines = (inputs @ kernel) / np.linalg.norm(inputs, axis=1)[:, None] / np.linalg.norm(kernel, axis=0)
    np.testing.assert_allclose(outputs, np.maximum(4.0 * cosines, 0), rtol=1e-5, atol=1e-6)
    again = boost.CosineHead.from_config(head.get_config())
    again.build([None, 7])
    again.set_weights(head.get_weights())
    np.testing.assert_array_equal(again(inputs), outputs)
    assert [variable.shape.rank for variable in head.trainable_variables] == [2, 0]


def test_a_cosine_head_in_float16_takes_zeros_and_long_vectors():
    head = boost.CosineHead(2, multiplier=1.0, dtype="mixed_float16")
    outputs = head(np.array([[0.0] * 4, [1000.0] * 4], np.float16)).numpy()
    expected = head.kernel.numpy().sum(axis=0) / np.linalg.norm(head.kernel.numpy(), axis=0) / 2
    np.testing.assert_allclose(outputs, [[0.0, 0.0], expected], atol=2e-3)


def test_the_last_dense_layer_of_a_model_becomes_a_cosine_head():
    inputs = tf.keras.Input([3])
    model = tf.keras.Model(inputs, layers.Dense(2, name="last")(layers.Dense(4, name="first")(inputs)))
    made, said = with_cosine_head(model)
    assert [type(layer) for layer in made.layers[-2:]] == [tf.keras.layers.Dense, boost.CosineHead]
    assert said == "last compares by angles now, without its bias"


# Several ranks.


def of_two_ranks():
    """On a rank: what is printed and which stages there are, with a server of one rank each and of two."""
    import contextlib
    import io

    said = []
    for device_number in (1, 2):
        config = manual("adasum", common={"device_number": device_number, "gradient_split_groups": [1]})
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            optimizer = boost.apply(tf.keras.optimizers.legacy.SGD(0.1), config=config)
            variables = [tf.Variable([1.0, 2.0]), tf.Variable([3.0])]
            optimizer.minimize(lambda v=variables: tf.add_n([tf.reduce_sum(x * x) for x in v]), variables)
        said.append((printed.getvalue(), "Adasum" in stages.explain(optimizer), [x.numpy() for x in variables]))
    return collective.current().rank, said


@pytest.mark.slow("three ranks share two cores")
def test_adasum_counts_ranks_by_the_device_number_and_rank_0_alone_speaks(on_ranks):
    """The number of devices of a server is not taken to be 8."""
    for rank, ((one, is_adasum, _), (two, is_mean, values)) in on_ranks(2, of_two_ranks):
        assert is_adasum and not is_mean
        assert ("updates of 2 groups of 1 ranks are combined" in one) == (rank == 0)
        assert ("left out, because it needs 2, 4, 8... times device_number=2 ranks" in two) == (rank == 0)
        np.testing.assert_allclose(np.concatenate(values), [0.8, 1.6, 2.4], rtol=1e-6)


@pytest.mark.slow("three ranks share two cores")
def test_three_groups_are_not_combined_in_pairs(on_ranks):
    assert not any(is_adasum for _, ((_, is_adasum, _), _) in on_ranks(3, of_two_ranks))


def small_model():
    tf.keras.utils.set_random_seed(3)
    first = layers.Dense(4, activation="tanh", input_shape=[3], name="first")
    return compiled(tf.keras.Sequential([first, layers.Dense(2, activation="softmax", name="last")]))


def in_a_subspace(folder):
    """On a rank: weights after steps along 3 directions that one of the ranks computes, with batches of its own."""
    config = manual("dim_reduce", dim_reduce={"n_components": 3, "weight_load_dir": folder, "timeout": 60})
    model = boost.apply(small_model(), config=config, loss_scale_manager=FixedLossScaleManager(64.0))
    features = np.random.default_rng(collective.current().rank).normal(size=(8, 3)).astype(np.float32)
    model.fit(features, np.arange(8) % 2, batch_size=4, epochs=2, verbose=0)
    return model.get_weights()


@pytest.mark.slow("one process takes these steps in the cases above")
def test_ranks_take_the_same_steps_in_a_subspace_that_one_of_them_computes(on_ranks, tmp_path):
    model = small_model()
    keep_checkpoints(model, tmp_path, 4, (np.eye(4, 3, dtype=np.float32), np.arange(4) % 2))
    mine, other = on_ranks(2, in_a_subspace, str(tmp_path))
    for left, right, start in zip(mine, other, small_model().get_weights()):
        np.testing.assert_array_equal(left, right)
        assert not np.array_equal(left, start)
    assert len(list(tmp_path.glob("pca_basis/pca_basis_*.npy"))) == 1
