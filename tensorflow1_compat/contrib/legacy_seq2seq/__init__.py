"""`tf.contrib.legacy_seq2seq`: decoders unrolled over lists of time steps, and models that use these decoders."""

from tensorflow1_compat.contrib.legacy_seq2seq.decoders import (
    attention_decoder,
    basic_rnn_seq2seq,
    embedding_attention_decoder,
    embedding_rnn_decoder,
    rnn_decoder,
    sequence_loss,
    sequence_loss_by_example,
)
from tensorflow1_compat.contrib.legacy_seq2seq.models import (
    embedding_attention_seq2seq,
    embedding_rnn_seq2seq,
    embedding_tied_rnn_seq2seq,
    model_with_buckets,
    tied_rnn_seq2seq,
)
