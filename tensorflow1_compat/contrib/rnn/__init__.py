"""`tf.contrib.rnn`: cells, wrappers and loops of recurrent networks, with the variable names of TensorFlow 1.15."""

from keras.api._v1.keras.__internal__.legacy.rnn_cell import (
    BasicLSTMCell,
    BasicRNNCell,
    DeviceWrapper,
    DropoutWrapper,
    GRUCell,
    LSTMCell,
    LSTMStateTuple,
    MultiRNNCell,
    ResidualWrapper,
    RNNCell,
)
from keras.src.layers.rnn.legacy_cells import LayerRNNCell
from tensorflow.compat.v1.nn import (
    bidirectional_dynamic_rnn,
    static_bidirectional_rnn,
    static_rnn,
    static_state_saving_rnn,
)

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
