"""`tf.contrib.seq2seq`: decoders, helpers and attention around RNN cells."""

from tensorflow1_compat.contrib.seq2seq.attention import (
    AttentionMechanism,
    BahdanauAttention,
    BahdanauMonotonicAttention,
    LuongAttention,
    LuongMonotonicAttention,
    monotonic_attention,
    safe_cumprod,
)
from tensorflow1_compat.contrib.seq2seq.attention_wrapper import AttentionWrapper, AttentionWrapperState, hardmax
from tensorflow1_compat.contrib.seq2seq.beam_search import (
    BeamSearchDecoder,
    BeamSearchDecoderOutput,
    BeamSearchDecoderState,
    FinalBeamSearchDecoderOutput,
    gather_tree,
    gather_tree_from_array,
    tile_batch,
)
from tensorflow1_compat.contrib.seq2seq.decoder import BasicDecoder, BasicDecoderOutput, Decoder, dynamic_decode
from tensorflow1_compat.contrib.seq2seq.helper import (
    CustomHelper,
    GreedyEmbeddingHelper,
    Helper,
    InferenceHelper,
    SampleEmbeddingHelper,
    ScheduledEmbeddingTrainingHelper,
    ScheduledOutputTrainingHelper,
    TrainingHelper,
)
from tensorflow1_compat.contrib.seq2seq.loss import sequence_loss
