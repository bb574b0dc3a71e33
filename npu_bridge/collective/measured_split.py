"""The split of a job's own gradients that makes its step shortest, for speeds that were measured in this job.

`npu-run --timeline` measures them, `npu-run --split` hands them to the ranks. Every rank then finds the same split, as
all of them have the same speeds and the same gradients.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from npu_bridge.base.arguments import is_number
from npu_bridge.collective.cost_model import shortest_sizes
from npu_bridge.collective.fragments import flight_bytes

# In which the launcher hands them over.
VARIABLE = "NPU_RUN_SPLIT"

# Cuts are searched between so many runs of gradients; more would be finer than what was measured.
_MOST_PIECES = 120


@dataclasses.dataclass(frozen=True)
class Speeds:
    """How fast a job computes and sends gradients.

    Attributes:
      forward_secs: until the first gradient is there.
      backward_secs: from then on until the last one is; gradients become ready evenly by bytes.
      transfer_secs: what any transfer takes, however small.
      exchange_secs: what all gradients together take besides.
    """

    forward_secs: float
    backward_secs: float
    transfer_secs: float
    exchange_secs: float

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            if not is_number(value) or not 0.0 <= value < float("inf"):
                raise ValueError(f"{name} is no time. Expected a number of seconds, not negative; got {value!r}")

    def as_text(self) -> str:
        """The speeds as one line of JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> Speeds:
        """The speeds from a mapping by attribute.

        Raises:
          ValueError: one is missing, or is no time.
        """
        missing = [field.name for field in dataclasses.fields(cls) if field.name not in facts]
        if missing:
            raise ValueError(f"{', '.join(missing)} not given")
        return cls(**{field.name: facts[field.name] for field in dataclasses.fields(cls)})

    def ready_secs(self, shares: Sequence[float]) -> list[float]:
        """When each gradient is there, of shares of all bytes in the order they become ready."""
        return [self.forward_secs + self.backward_secs * total for total in itertools.accumulate(shares)]

    def secs_of_transfer(self, share: float) -> float:
        """How long a share of all bytes takes in one transfer."""
        return self.transfer_secs + share * self.exchange_secs


def fastest_cut(sizes_bytes: Sequence[int], speeds: Speeds, ranks: int) -> list[list[int]]:
    """The cut into fragments whose gradients have all arrived first, as few fragments as come close.

    Both are positions in `sizes_bytes`, which stand in the order in which gradients become ready. It depends on the
    number of ranks how much is sent at once.
    """
    if not sizes_bytes:
        return []
    total_bytes = max(sum(sizes_bytes), 1)
    shares = [size / total_bytes for size in sizes_bytes]
    ends = _ends_of_pieces(shares)
    sizes = shortest_sizes(
        _fragment_secs(shares, ends, speeds, flight_bytes(ranks) / total_bytes),
        len(ends) - 1,
        speeds.forward_secs + speeds.backward_secs,
    )
    bounds = [ends[total] for total in itertools.accumulate(sizes, initial=0)]
    return [list(range(start, end)) for start, end in zip(bounds, bounds[1:])]


def describe_cut(cut: Sequence[Sequence[int]], sizes_bytes: Sequence[int]) -> str:
    """A line for people: how many fragments, and the share of all bytes of each, in the order they are sent."""
    total_bytes = max(sum(sizes_bytes), 1)
    shares = (100 * sum(sizes_bytes[position] for position in fragment) / total_bytes for fragment in cut)
    count = f"{len(cut)} fragment{'' if len(cut) == 1 else 's'}"
    return f"{total_bytes / 1e6:.1f} MB of gradients in {count}: {', '.join(f'{share:.0f} %' for share in shares)}"


def _ends_of_pieces(shares):
    """Where runs of whole gradients end that are large enough to be told apart."""
    ends, carried = [0], 0.0
    for position, share in enumerate(shares):
        carried += share
        if carried >= 1.0 / _MOST_PIECES or position == len(shares) - 1:
            ends.append(position + 1)
            carried = 0.0
    return ends


def _fragment_secs(shares, ends, speeds, largest):
    """How long the transfers of each possible fragment take, and when they have arrived with nothing before them."""
    ready = speeds.ready_secs(shares)
    fragments = {}
    for number, start in enumerate(ends[:-1]):
        length = arrived = carried = 0.0
        reached = start
        for later, end in enumerate(ends[number + 1 :], number + 1):
            for position in range(reached, end):
                if position > start and carried + shares[position] > largest:
                    # What is full is on its way.
                    secs = speeds.secs_of_transfer(carried)
                    length, arrived = length + secs, max(arrived, ready[position - 1]) + secs
                    carried = 0.0
                carried += shares[position]
            reached = end
            last = speeds.secs_of_transfer(carried)
            fragments[number, later] = length + last, max(arrived, ready[end - 1]) + last
    return fragments
