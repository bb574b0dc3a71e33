"""Holds the documented interface: `npu_bridge.estimator.npu` with its modules, and the operators next to it.

Importing any module below makes sessions read the options in their settings, as `npu_bridge.npu_init` does: many
scripts fill in an `NpuOptimizer` entry and import only an operator. From then on ranks that train separate models or
save into one folder cause a warning, and stock trainings hold the folder they save to.
"""

from npu_bridge.base.lazy import attributes, submodules
from npu_bridge.estimator.npu.npu_session import decorate_sessions
from npu_bridge.gradients.training_apart import watch_trainings
from npu_bridge.session import hold_for_saver_hooks, watch_savers

__all__ = ["npu", "npu_aicore_ops", "npu_ops", "npu_unary_ops"]

__getattr__ = attributes(__name__, submodules(__name__, *__all__))

decorate_sessions()
watch_trainings()
hold_for_saver_hooks()
watch_savers()
