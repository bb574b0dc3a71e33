"""Wraps Keras optimizers of the legacy generation (`tf.keras.optimizers.legacy`) in a pipeline."""

from __future__ import annotations

from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.tf_internals.training import compute_legacy_gradients, create_all_weights, scope_of_variables
from npu_bridge.gradients.graph_mode import is_building_graph
from npu_bridge.gradients.keras.shared import LossScaleMixin, PipelineMixin, make_forwarding_method

_Base = tf.keras.optimizers.legacy.Optimizer
# In a TF 1 graph Keras checks for exactly this class when it decides if a mixed_float16 model needs loss scaling.
_KerasLossScaling = next(
    scaling for scaling in tf.keras.mixed_precision.LossScaleOptimizer.__subclasses__() if issubclass(scaling, _Base)
)


@tf.keras.utils.register_keras_serializable(package="npu_bridge")
class LegacyPipelineOptimizer(PipelineMixin, _Base):
    """A wrapper of a legacy optimizer that first passes gradients through a pipeline; also works in TF 1 graphs."""

    _HAS_AGGREGATE_GRAD = True

    def _compute_gradients(self, loss, var_list, grad_loss=None, tape=None):
        return self._pipeline.compute_gradients(
            loss,
            tape,
            lambda scaled, tape: compute_legacy_gradients(self._optimizer, scaled, var_list, grad_loss, tape),
        )

    def get_gradients(self, loss, params):
        """Returns averaged gradients in a TF 1 graph; arguments as in `tf.keras.optimizers.legacy.Optimizer`."""
        params = tf.nest.flatten(params)
        pairs = self._pipeline.compute_gradients(
            loss, None, lambda scaled, _: list(zip(self._optimizer.get_gradients(scaled, params), params))
        )
        return [grad for grad, _ in pairs]

    def _aggregate_gradients(self, grads_and_vars):
        return self._pipeline.average_unless_averaged(grads_and_vars)

    def apply_gradients(self, grads_and_vars, name=None, experimental_aggregate_gradients=True):
        """Updates the variables, unless a stage of the pipeline skips the step.

        Args:
          grads_and_vars: (gradient, variable) pairs. Gradients are averaged over the ranks unless they already are.
          name: name of the update.
          experimental_aggregate_gradients: False leaves the gradients unchanged.
        Returns:
          The op that updates. In eager execution: the result of the wrapped optimizer, or None with loss scaling.
        """
        pairs = list(grads_and_vars)
        if experimental_aggregate_gradients:
            pairs = self._aggregate_gradients(pairs)
        self._make_variables(pairs)
        keywords = {} if experimental_aggregate_gradients else {"experimental_aggregate_gradients": False}
        keywords.update({} if name is None else {"name": name})  # a script's own class can lack `name`
        return self._pipeline.apply(pairs, lambda trained: self._optimizer.apply_gradients(trained, **keywords))

    def _make_variables(self, pairs):
        """Creates variables outside of the condition that skips steps, so that no name has the condition's scope."""
        if self._pipeline.pipeline.can_skip_updates and not tf.executing_eagerly() and not is_building_graph():
            with tf.name_scope(scope_of_variables(self._optimizer)), tf.init_scope():
                self._create_all_weights([variable for grad, variable in pairs if grad is not None])

    def variables(self):
        """Returns all variables of the inner optimizer and of the stages, and the stand-ins for 16-bit variables."""
        return self._all_variables()

    @property
    def weights(self):
        return self.variables()

    def _create_all_weights(self, var_list):
        create_all_weights(self._optimizer, self._pipeline.inner.stand_ins.find_or_make(var_list))
        self._pipeline.pipeline.create_variables(var_list)

    def _create_or_restore_slot_variable(self, slot_variable_position, slot_name, variable):
        (seen,) = self._pipeline.inner.stand_ins.find_or_make([variable])
        return self._slot_to_restore(slot_variable_position, slot_name, seen)

    _slot_to_restore = make_forwarding_method("_create_or_restore_slot_variable")

    _create_hypers = make_forwarding_method("_create_hypers")
    _get_hyper = make_forwarding_method("_get_hyper")
    _restore_slot_variable = make_forwarding_method("_restore_slot_variable")
    _set_hyper = make_forwarding_method("_set_hyper")
    add_slot = make_forwarding_method("add_slot")
    add_weight = make_forwarding_method("add_weight")
    get_slot = make_forwarding_method("get_slot")
    get_slot_names = make_forwarding_method("get_slot_names")


@tf.keras.utils.register_keras_serializable(package="npu_bridge")
class LegacyLossScaleOptimizer(LossScaleMixin, LegacyPipelineOptimizer, _KerasLossScaling):
    """Adds loss scaling; derives from the loss-scale optimizer of Keras, so that Keras adds no second loss scaling."""
