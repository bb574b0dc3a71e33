"""`tf.contrib.rnn`: RNN cells, cell wrappers and loops, with the variable names of TensorFlow 1.15."""

import tensorflow.compat.v1 as tf
from tensorflow.compat.v1.nn import (
    bidirectional_dynamic_rnn,
    static_bidirectional_rnn,
    static_rnn,
    static_state_saving_rnn,
)

from npu_bridge.base.tf_internals.contrib import rnn_cell_base
from tensorflow1_compat.contrib.rnn.blocks import (
    GRUBlockCell,
    GRUBlockCellV2,
    LSTMBlockCell,
    LSTMBlockFusedCell,
    LSTMBlockWrapper,
)
from tensorflow1_compat.contrib.rnn.cells import (
    Conv1DLSTMCell,
    Conv2DLSTMCell,
    Conv3DLSTMCell,
    ConvLSTMCell,
    CoupledInputForgetGateLSTMCell,
    IndRNNCell,
    LayerNormBasicLSTMCell,
    NASCell,
    SRUCell,
    UGRNNCell,
)
from tensorflow1_compat.contrib.rnn.loops import (
    FusedRNNCell,
    FusedRNNCellAdaptor,
    TimeReversedFusedRNN,
    stack_bidirectional_dynamic_rnn,
    stack_bidirectional_rnn,
    transpose_batch_time,
)
from tensorflow1_compat.contrib.rnn.wrappers import (
    AttentionCellWrapper,
    CompiledWrapper,
    EmbeddingWrapper,
    HighwayWrapper,
    InputProjectionWrapper,
    OutputProjectionWrapper,
)

_CELLS = tf.nn.rnn_cell
BasicLSTMCell = _CELLS.BasicLSTMCell
BasicRNNCell = _CELLS.BasicRNNCell
DeviceWrapper = _CELLS.DeviceWrapper
DropoutWrapper = _CELLS.DropoutWrapper
GRUCell = _CELLS.GRUCell
LSTMCell = _CELLS.LSTMCell
LSTMStateTuple = _CELLS.LSTMStateTuple
MultiRNNCell = _CELLS.MultiRNNCell
ResidualWrapper = _CELLS.ResidualWrapper
RNNCell = _CELLS.RNNCell
LayerRNNCell = rnn_cell_base()
