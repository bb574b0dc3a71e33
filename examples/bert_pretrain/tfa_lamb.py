"""Wraps tensorflow-addons' LAMB under the documented argument names, for `--optimizer tfa_lamb`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

with warnings.catch_warnings():
    # tensorflow-addons announces its end of life, and the TF versions it was tested with, at every import.
    warnings.filterwarnings("ignore", message=r"\s*TensorFlow Addons", category=UserWarning)
    import tensorflow_addons as tfa


class TfaLAMBOptimizer(tfa.optimizers.LAMB):
    """Layer-wise adaptive moments with decoupled weight decay (You et al. 2019).

    Args:
      learning_rate: a number, or a Keras learning-rate schedule. The schedule gets `iterations`; skipped steps do
        not count.
      weight_decay_rate: share of a variable added to its update before the layer-wise ratio.
      beta_1: decay of the first moment.
      beta_2: decay of the second moment.
      epsilon: added to the root of the second moment.
      exclude_from_weight_decay: regular expressions; a variable whose name contains a match has neither
        weight decay nor a layer-wise ratio, as in the published code of the paper.
      name: prefix of the slot variables.
    """

    def __init__(
        self,
        learning_rate=0.001,
        weight_decay_rate: float = 0.01,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-6,
        exclude_from_weight_decay: Sequence[str] | None = None,
        name: str = "LAMB",
        **kwargs,
    ):
        super().__init__(
            learning_rate=learning_rate,
            weight_decay=weight_decay_rate,
            beta_1=beta_1,
            beta_2=beta_2,
            epsilon=epsilon,
            exclude_from_weight_decay=list(exclude_from_weight_decay or []),
            name=name,
            **kwargs,
        )

    def get_config(self):
        """Returns the constructor's arguments, under the constructor's names."""
        config = super().get_config()
        config["weight_decay_rate"] = config.pop("weight_decay")
        # Both follow from the other arguments.
        config.pop("exclude_from_layer_adaptation")
        config.pop("decay")
        return config
