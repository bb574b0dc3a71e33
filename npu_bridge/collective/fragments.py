"""Which gradients travel together: aggregation fragments.

A fragment is a run of gradients, in the order the backward pass delivers them, that is summed over the ranks in one
transfer. The cut decides how much of the transfer hides behind the rest of the backward pass: everything but the
last fragment does. By default the last one holds 3.46 % of the bytes.
"""

from __future__ import annotations

import itertools
import math
from typing import Sequence

DEFAULT_PERCENTAGES = (96.54, 3.46)


def cut_by_size(sizes_bytes: Sequence[int], percentages: Sequence[float] = DEFAULT_PERCENTAGES) -> list[list[int]]:
    """Cuts gradients into fragments that hold given shares of the bytes.

    Each fragment but the last ends at the gradient whose running total comes nearest to its share, where what the
    fragment before took too much or too little is settled first. On a tie the earlier gradient ends it, and every
    fragment holds at least one gradient. The last fragment takes the rest; when gradients run out, later fragments
    do not exist.

    Args:
      sizes_bytes: bytes of each gradient, in the order they become ready.
      percentages: share of each fragment, summing to 100.
    Returns:
      Positions in `sizes_bytes`, one list per fragment, together 0..n-1 in order.
    Example: cut_by_size([10, 20, 30, 25, 15], [50, 50]) gives [[0, 1, 2], [3, 4]].
    """
    totals = list(itertools.accumulate(sizes_bytes, initial=0))
    fragments: list[list[int]] = []
    start, target = 0, 0.0
    for percentage in percentages[:-1]:
        if start == len(sizes_bytes):
            break
        target += totals[-1] * percentage / 100.0
        end = min((abs(totals[end] - target), end) for end in range(start + 1, len(sizes_bytes) + 1))[1]
        fragments.append(list(range(start, end)))
        start = end
    if start < len(sizes_bytes):
        fragments.append(list(range(start, len(sizes_bytes))))
    return fragments


def lossless_prescale(world_size: int) -> float:
    """The largest power of two not above 1 / world_size.

    Multiplying by it loses no bits, and the sum of `world_size` so scaled finite values is finite.
    """
    return 2.0 ** -math.ceil(math.log2(world_size))
