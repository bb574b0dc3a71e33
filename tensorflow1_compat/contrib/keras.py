"""`tf.contrib.keras`: Keras, as `tf.keras`."""

from keras.api._v1.keras import *
