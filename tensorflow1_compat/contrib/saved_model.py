"""`tf.contrib.saved_model`: functions that read saved models."""

from tensorflow.python.saved_model.loader_impl import parse_saved_model as read_saved_model
from tensorflow.python.tools.saved_model_utils import get_meta_graph_def
