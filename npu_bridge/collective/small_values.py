"""Exchanges small values between ranks, such as settings and names; counts of collectives leave these exchanges out."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np

from npu_bridge.collective import wire_names
from npu_bridge.collective.apart import run_in_separate_graph
from npu_bridge.collective.checks.exchanges import disable_exchange_count
from npu_bridge.collective.this_process import current


def gather_values(value: Any, name: str) -> list:
    """Returns the values of all ranks, in rank order.

    Args:
      value: this rank's value: small and JSON-compatible. Values of ranks can differ in size.
      name: name of the collective, the same on every rank.
    Ranks: collective.
    """
    ranks = current()
    if ranks.size == 1:
        return [value]
    letters = np.frombuffer(json.dumps(value).encode() + b"\n", np.uint8).astype(np.int32)
    with disable_exchange_count():
        found = run_in_separate_graph(lambda row: ranks.all_gather(row, name), letters)
    return [json.loads(line) for line in bytes(found.tolist()).splitlines()]


def wait_for_ranks(name: str) -> None:
    """Waits until every rank has called this; a rank that dies meanwhile ends the job.

    Args:
      name: name of the collective, the same on every rank.
    Ranks: collective.
    """
    gather_values(0, name)


def share_label(optimizer: Any) -> None:
    """Gives the collectives of a Keras optimizer one label on all ranks, of which perhaps only some loaded a model.

    Has no effect in threads, where ranks can meet in another order.

    Ranks: collective.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    owner = wire_names.owner_of(optimizer)
    with wire_names.use_label(""):
        labels = gather_values(owner and owner.given_label, "label_of_optimizer")
    known = [label for label in labels if label is not None]
    if owner is not None and owner.given_label is None and known:
        owner.given_label = known[0]
