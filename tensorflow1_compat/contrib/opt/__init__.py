"""`tf.contrib.opt`: additional optimizers, with the slots and variable names of TensorFlow 1.15."""

from tensorflow1_compat.contrib.opt.adams import AdaMaxOptimizer, LazyAdamOptimizer, NadamOptimizer
from tensorflow1_compat.contrib.opt.external import ExternalOptimizerInterface, ScipyOptimizerInterface
from tensorflow1_compat.contrib.opt.lars import LARSOptimizer
from tensorflow1_compat.contrib.opt.signs import get_cosine_decay_fn, get_linear_decay_fn, get_restart_decay_fn
from tensorflow1_compat.contrib.opt.weight_decay import (
    AdamWOptimizer,
    DecoupledWeightDecayExtension,
    MomentumWOptimizer,
    extend_with_decoupled_weight_decay,
)
from tensorflow1_compat.contrib.opt.wrappers import (
    MovingAverageOptimizer,
    MultitaskOptimizerWrapper,
    VariableClippingOptimizer,
    clip_gradients_by_global_norm,
)
