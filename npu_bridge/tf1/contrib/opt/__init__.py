"""`tf.contrib.opt`: optimizers of TensorFlow 1.15, with the slots and variable names they had."""

from npu_bridge.tf1.contrib.opt.adams import AdaMaxOptimizer, LazyAdamOptimizer, NadamOptimizer
from npu_bridge.tf1.contrib.opt.external import ExternalOptimizerInterface, ScipyOptimizerInterface
from npu_bridge.tf1.contrib.opt.lars import LARSOptimizer
from npu_bridge.tf1.contrib.opt.signs import (
    AddSignOptimizer,
    PowerSignOptimizer,
    get_cosine_decay_fn,
    get_linear_decay_fn,
    get_restart_decay_fn,
)
from npu_bridge.tf1.contrib.opt.weight_decay import (
    AdamWOptimizer,
    DecoupledWeightDecayExtension,
    MomentumWOptimizer,
    extend_with_decoupled_weight_decay,
)
from npu_bridge.tf1.contrib.opt.wrappers import (
    MovingAverageOptimizer,
    MultitaskOptimizerWrapper,
    VariableClippingOptimizer,
    clip_gradients_by_global_norm,
)
