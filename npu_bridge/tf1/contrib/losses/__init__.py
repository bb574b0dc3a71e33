"""`tf.contrib.losses`: losses that add themselves to `tf.GraphKeys.LOSSES`."""

from tf_slim.losses import *
from tf_slim.losses import metric_learning
from tf_slim.losses.loss_ops import (
    absolute_difference,
    add_loss,
    compute_weighted_loss,
    cosine_distance,
    get_losses,
    get_regularization_losses,
    get_total_loss,
    hinge_loss,
    log_loss,
    mean_pairwise_squared_error,
    mean_squared_error,
    sigmoid_cross_entropy,
    softmax_cross_entropy,
    sparse_softmax_cross_entropy,
)

from npu_bridge.tf1.contrib.slim import mended

mended.mend()
