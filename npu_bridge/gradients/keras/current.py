"""Wraps Keras optimizers of the current generation (`tf.keras.optimizers.Optimizer`) in a pipeline."""

from __future__ import annotations

from npu_bridge.base.errors import message
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.tf_internals import training
from npu_bridge.gradients.graph_mode import is_building_graph
from npu_bridge.gradients.keras.own_variables import load_matching_values, save_variable_names
from npu_bridge.gradients.keras.shared import LossScaleMixin, PipelineMixin, make_forwarding_method


@tf.keras.utils.register_keras_serializable(package="npu_bridge")
class CurrentPipelineOptimizer(PipelineMixin, tf.keras.optimizers.Optimizer):
    """Wraps an optimizer of the current Keras generation, and passes gradients through a pipeline first.

    Always apply what `compute_gradients` returns. Otherwise, in eager execution, the next gradients of its variables
    count as averaged and changed by the stages, even if they come from a tape: ranks would then train apart.
    """

    def compute_gradients(self, loss, var_list, tape=None):
        """Returns gradients averaged over the ranks; arguments as in `tf.keras.optimizers.Optimizer`."""
        return self._pipeline.compute_gradients(
            loss, tape, lambda scaled, tape: self._optimizer.compute_gradients(scaled, var_list, tape=tape)
        )

    def aggregate_gradients(self, grads_and_vars):
        """Averages gradients over the ranks, unless they are already averaged."""
        return self._pipeline.average_unless_averaged(grads_and_vars)

    def apply_gradients(self, grads_and_vars, name=None, skip_gradients_aggregation=False, **kwargs):
        """Updates the variables, unless a stage of the pipeline skips the step.

        Args:
          grads_and_vars: (gradient, variable) pairs. Gradients are averaged over the ranks unless they already are.
          name: name of the update.
          skip_gradients_aggregation: True leaves the gradients unchanged.
          **kwargs: `experimental_aggregate_gradients`, the opposite of `skip_gradients_aggregation`.
        Returns:
          The variable that counts updates; in a TF 1 graph the op that updates.
        """
        pairs = list(grads_and_vars)
        is_skipping = skip_gradients_aggregation or not kwargs.pop("experimental_aggregate_gradients", True)
        if not is_skipping:
            pairs = self.aggregate_gradients(pairs)
        if is_building_graph():
            return self._pipeline.apply(
                pairs, lambda trained: self._pipeline.inner.apply_gradients(trained, None, name)
            )
        keywords = {"skip_gradients_aggregation": True} if is_skipping else {}
        keywords.update(kwargs, **({} if name is None else {"name": name}))  # a script's own class can lack `name`
        self._pipeline.apply(pairs, lambda trained: self._optimizer.apply_gradients(trained, **keywords))
        return self.iterations

    def get_updates(self, loss, params):
        """Raises ValueError, because Keras trains in TF 1 graphs with legacy optimizers only."""
        raise ValueError(
            f"{self.name}: Keras trains in TF 1 graphs with legacy optimizers only. Expected a wrapped "
            f"tf.keras.optimizers.legacy.Optimizer; got {type(self._optimizer).__name__}. Write "
            f"tf.keras.optimizers.legacy.{type(self._optimizer).__name__}(...)."
        )

    def build(self, var_list):
        """Creates the slots of the variables, and the state of the stages for these variables."""
        self._optimizer.build(self._pipeline.inner.stand_ins.find_or_make(var_list))
        self._pipeline.pipeline.create_variables(var_list)

    def finalize_variable_values(self, var_list):
        """Sets the variables to their moving averages at the end of a training, if the optimizer has `use_ema`."""
        self._pipeline.inner.stand_ins.call_with_stand_ins(var_list, self._optimizer.finalize_variable_values)

    @property
    def variables(self):
        """All variables: of the inner optimizer, of the stages, and the stand-ins for 16-bit variables."""
        return type(self._optimizer.variables)(self._all_variables())

    def save_own_variables(self, store):
        """Writes the variables into a `.keras` or `.weights.h5` file, with the names of the stages' variables."""
        super().save_own_variables(store)
        save_variable_names(store, len(self._inner_variables()), self._own_variables())

    def load_own_variables(self, store):
        """Reads the variables from a `.keras` or `.weights.h5` file, even if the file was saved with other stages."""
        if not load_matching_values(store, self._inner_variables(), self._own_variables()):
            super().load_own_variables(store)

    def get_config(self):
        # Keras calls this to convert, but has no legacy optimizer of this kind.
        if training.compile_converts_optimizers():
            problem, expected = "without TensorFlow 2 behaviour Keras cannot use this optimizer", "a legacy optimizer"
            fix = "Use an optimizer of tf.keras.optimizers.legacy or npu_bridge.optimizers.keras_legacy."
            raise ValueError(
                message(self._settings.documented_name, problem, expected, type(self._optimizer).__name__, fix)
            )
        return {**super().get_config(), "is_legacy_optimizer": False}

    _compute_current_learning_rate = make_forwarding_method("_compute_current_learning_rate")
    _create_or_restore_slot_variable = make_forwarding_method(
        "_create_or_restore_slot_variable"
    )  # its error names the class
    add_variable = make_forwarding_method("add_variable")
    add_variable_from_reference = make_forwarding_method("add_variable_from_reference")
    exclude_from_weight_decay = make_forwarding_method("exclude_from_weight_decay")
    update_step = make_forwarding_method("update_step")


@tf.keras.utils.register_keras_serializable(package="npu_bridge")
class CurrentLossScaleOptimizer(LossScaleMixin, CurrentPipelineOptimizer, tf.keras.mixed_precision.LossScaleOptimizer):
    """Adds loss scaling; derives from the loss-scale optimizer of Keras, so that Keras adds no second loss scaling."""
