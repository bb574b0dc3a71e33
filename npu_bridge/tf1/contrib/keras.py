"""`tf.contrib.keras`: Keras, as `tf.keras`."""

from keras.api._v1.keras import *
from keras.api._v1.keras import (
    Model,
    Sequential,
    activations,
    applications,
    backend,
    callbacks,
    constraints,
    datasets,
    initializers,
    layers,
    losses,
    metrics,
    models,
    optimizers,
    preprocessing,
    regularizers,
    utils,
)
