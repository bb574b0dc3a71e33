"""Makes optimizers known from papers, such as `LAMB(0.001)`, for TF 1 graphs and for Keras.

In a TF 1 graph that is being built, each name makes a `tf.compat.v1.train.Optimizer`; elsewhere it makes a
`tf.keras.optimizers.Optimizer`. The modules `tf1`, `keras`, `keras_legacy` and `keras3` have the classes of one kind.
"""

from __future__ import annotations

from npu_bridge.base import lazy

__all__ = ["Adadelta", "Adagrad", "Adam", "AdamP", "AdamW", "BertAdam", "LAMB", "LARS", "RMSProp", "SGD", "from_config"]

_MODULES = (
    "keras_optimizer",
    "tf1_optimizer",
    "groups",
    "hypers",
    "keras",
    "keras3",
    "keras_legacy",
    "make",
    "rule",
    "rules",
    "tf1",
)
_PLACES = {name: f"npu_bridge.optimizers.choose:{name}" for name in __all__}

__getattr__ = lazy.lazy_getattr(__name__, {**_PLACES, **lazy.places_of_submodules(__name__, *_MODULES)})
