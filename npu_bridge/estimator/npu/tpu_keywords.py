"""Arguments of a `TPUEstimator` that scripts carry over to an `NPUEstimator`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from npu_bridge.options.errors import nearest, say_once

_KEYWORDS = (
    "batch_axis",
    "embedding_config_spec",
    "eval_batch_size",
    "eval_on_tpu",
    "export_saved_model_api_version",
    "export_to_cpu",
    "export_to_tpu",
    "predict_batch_size",
    "train_batch_size",
    "use_tpu",
)


def accept_tpu_keywords(owner: str, keywords: Mapping[str, Any]) -> None:
    """Warns once about such arguments.

    Args:
      owner: the class that was given them.
      keywords: by name.
    Raises:
      TypeError: one is something else.
    """
    for name in keywords:
        if name not in _KEYWORDS:
            near = nearest(name, _KEYWORDS)
            mend = f" Did you mean {near!r}?" if near else ""
            raise TypeError(f"{owner}() got an unexpected keyword argument {name!r}.{mend}")
    if keywords:
        text = f"{owner}: {', '.join(sorted(keywords))} are arguments of a TPUEstimator and have no effect here. "
        say_once(logging.WARNING, text + "Leave them out; an input_fn makes the batches.")
