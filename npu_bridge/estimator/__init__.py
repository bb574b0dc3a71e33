"""Holds the documented interface: `npu_bridge.estimator.npu` with its modules, and the operators next to it.

Importing any of these modules makes sessions read the options in their ConfigProto, as `npu_bridge.npu_init` does: many
scripts fill in an `NpuOptimizer` entry and import only an operator. From then on, a warning names ranks that train
separate models or save into one folder, and trainings of stock TensorFlow lock the folder they save to.
"""

from npu_bridge.base.lazy import lazy_getattr, places_of_submodules
from npu_bridge.estimator.npu.npu_session import decorate_sessions
from npu_bridge.gradients.first_step.training_apart import check_training_of_process
from npu_bridge.session import hold_for_saver_hooks, watch_savers

__all__ = ["npu", "npu_aicore_ops", "npu_ops", "npu_unary_ops"]

__getattr__ = lazy_getattr(__name__, places_of_submodules(__name__, *__all__))

decorate_sessions()
check_training_of_process()
hold_for_saver_hooks()
watch_savers()
