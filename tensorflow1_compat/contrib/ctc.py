"""`tf.contrib.ctc`, which is now part of `tf.nn`."""

from tensorflow.compat.v1.nn import ctc_beam_search_decoder, ctc_greedy_decoder, ctc_loss
