"""`tf.contrib.eager`: tools for eager execution."""

import tensorflow.compat.v1 as tf
from tensorflow.compat.v1 import (
    GradientTape,
    Variable,
    custom_gradient,
    enable_eager_execution,
    executing_eagerly,
    init_scope,
)
from tensorflow.compat.v1 import executing_eagerly as in_eager_mode
from tensorflow.compat.v1 import py_function as py_func
from tensorflow.compat.v1.train import Checkpoint
from tensorflow.python.eager.backprop import gradients_function, make_vjp
from tensorflow.python.eager.backprop import implicit_grad as implicit_gradients
from tensorflow.python.eager.backprop import implicit_val_and_grad as implicit_value_and_gradients
from tensorflow.python.eager.backprop import val_and_grad_function as value_and_gradients_function
from tensorflow.python.eager.polymorphic_function.polymorphic_function import function as defun

from tensorflow1_compat.test_util import run_in_graph_and_eager_modes as run_test_in_graph_and_eager_modes

Iterator = tf.data.make_one_shot_iterator
list_devices = tf.config.list_logical_devices
CheckpointableSaver = Checkpoint
Metric = tf.keras.metrics.Metric
Network = tf.keras.Model
Sequential = tf.keras.Sequential


def in_graph_mode():
    """Returns whether operations are added to a graph instead of running eagerly."""
    return not tf.executing_eagerly()


def get_optimizer_variables(optimizer):
    """Returns all variables of an optimizer."""
    return optimizer.variables()
