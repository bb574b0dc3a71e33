"""Trains Keras models by `SubspaceNewton`, and computes the basis once for all ranks of a host."""

from __future__ import annotations

import hashlib
import os
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base.errors import message, shown
from npu_bridge.base.output_folders import claim_output_folder
from npu_bridge.base.tf_internals.keras3 import name_of
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
from npu_bridge.optimizers.subspace.basis import Basis, compute_pca_basis
from npu_bridge.optimizers.subspace.newton import SubspaceNewton

_POLL_SECS = 0.5
_FOLDER = "pca_basis"


def train_in_subspace(
    model: tf.keras.Model,
    newton: SubspaceNewton,
    loss_scale_manager: Any = None,
    is_distributed: bool = True,
    gradient_split_groups: Sequence[int] | None = None,
) -> Any:
    """Makes `model.fit` train by `SubspaceNewton`; the optimizer of `model.compile` only counts the steps.

    Args:
      model: a compiled model with Keras's own `train_step`. Each trial of a step evaluates the loss, which changes
        moving statistics and metrics; they are restored afterwards.
      newton: the optimizer, with a basis for the model's trainable variables.
      loss_scale_manager, is_distributed, gradient_split_groups: as in `NPUOptimizer`.
    Returns:
      The `NPUOptimizer` around `newton`. It is also set as the attribute `subspace_newton` of the model, so that the
      model's checkpoints contain its state.
    Raises:
      ValueError: the model is not compiled.
    """
    if model.optimizer is None:
        fix = "Call model.compile first."
        raise ValueError(message("train_in_subspace", "the model has no loss", "a compiled model", model.name, fix))
    is_loss_scale = loss_scale_manager is not None
    optimizer = NPUOptimizer(
        newton, loss_scale_manager, is_distributed, is_loss_scale, gradient_split_groups=gradient_split_groups
    )
    newton.set_variables_to_restore(
        lambda: [*model.non_trainable_variables, *(v for metric in model.metrics for v in metric.variables)]
    )

    def train_step(data):
        features, labels, weights = tf.keras.utils.unpack_x_y_sample_weight(data)
        outputs = []

        def loss():
            outputs.append(model(features, training=True))
            return model.compute_loss(features, labels, outputs[-1], weights)

        grads_and_vars = optimizer.compute_gradients(loss, var_list=model.trainable_variables)
        optimizer.apply_gradients(grads_and_vars, global_step=model.optimizer.iterations)
        return model.compute_metrics(features, labels, outputs[0], weights)

    model.train_step = train_step
    model.train_function = None
    model.subspace_newton = optimizer
    return optimizer


def train_as_compiled(model: tf.keras.Model) -> None:
    """Undoes `train_in_subspace`: the model trains with the optimizer of `model.compile` again."""
    if hasattr(model, "subspace_newton"):
        del model.subspace_newton
        del model.train_step


def make_basis(settings: Mapping[str, Any], variables: Sequence[Any]) -> Basis:
    """Returns the basis that the section `dim_reduce` of a configuration describes.

    An existing file `pca_mat_path` is loaded. Otherwise one rank of each host computes the basis from the checkpoints
    in `weight_load_dir`, and writes it to the subfolder `pca_basis`. The other ranks wait for this file; later runs
    load it.

    Raises:
      ValueError: neither the file nor the folder exists, or the folder has too few checkpoints.
      OSError: the folder `pca_basis` contains other files, or cannot be written.
      RuntimeError: the file does not exist after `timeout` seconds.
    """
    path, folder, k = settings["pca_mat_path"], settings["weight_load_dir"], settings["n_components"]
    if path is not None and pathlib.Path(path).exists():
        return Basis.load(path)
    if folder is None or not pathlib.Path(folder).is_dir():
        problem, expected = "dim_reduce has no basis", "a file as pca_mat_path, or a folder as weight_load_dir"
        fix = f"Set weight_load_dir to a folder with at least {k} checkpoints."
        raise ValueError(message("BoostConfig", problem, expected, shown(folder if path is None else path), fix))
    names = [name_of(variable) for variable in variables]
    indices = sorted(pathlib.Path(folder).glob("*.index"))
    state = [names, k, [(index.name, index.stat().st_mtime_ns) for index in indices]]
    name = f"pca_basis_{hashlib.sha256(repr(state).encode()).hexdigest()[:16]}.npy"
    made, earlier = pathlib.Path(folder) / _FOLDER / name, pathlib.Path(folder) / name
    if earlier.exists():  # earlier versions wrote the file here
        return Basis.load(earlier)
    if collective.current().local_rank == 0 and not made.exists():
        # Does not exclude other processes: other hosts can write the same file.
        with claim_output_folder(
            os.fspath(made.parent), "boost", "dim_reduce", ("pca_basis_*",), is_exclusive=False
        ) as own:
            compute_pca_basis(os.fspath(folder), k, names).save(os.path.join(own.path, name))
    deadline = time.monotonic() + settings["timeout"]
    while not made.exists():
        if time.monotonic() > deadline:
            problem = f"the basis was not computed within {settings['timeout']} s"
            fix = "Read the error of the first rank of this host, or set a longer timeout."
            raise RuntimeError(message("boost", problem, f"the file {made}", "no file", fix))
        time.sleep(_POLL_SECS)
    return Basis.load(made)
