"""Models the time of a training step on n ranks: an alpha-beta model of ring all-reduces that overlap a backward pass.

Summing B bytes over n ranks in a ring takes 2 (n - 1) messages one after the other, each of B / n bytes:

    transfer = overhead + 2 (n - 1) (latency + B / (n bandwidth)) + B / host rate

An all-reduce starts when its last gradient is ready and the previous all-reduce has finished. Communication after the
end of the computation is exposed; the rest is hidden. A fragment is one all-reduce, or several when it is large
(`cut_for_flight`). Overlapping steps are simulated one after the other, all-reduce by all-reduce. The model is pure
arithmetic, without TensorFlow or Horovod.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from npu_bridge.collective.fragments import DEFAULT_PERCENTAGES, cut_by_size, flight_bytes

# The most fragments of the documented split strategies.
MOST_FRAGMENTS = 8
# A backward pass computes two products for each product of the forward pass.
FORWARD_SHARE = 1.0 / 3.0
# Splits within this factor of the best one count as equal, and the one with the fewest fragments wins: another fragment
# must be worth it.
_CLOSE_ENOUGH = 1.005
# Overlapping steps gain at most the ranks' wait for the network after the backward pass, usually half of it: they are
# tried if ranks wait for this share of a step, and kept if they gain more than the noise of a trial.
LEAST_WAIT = 0.1
LEAST_GAIN = 0.01
# The first of these steps differ: no earlier gradients are arriving.
_OVERLAPPED_STEPS = 6
_MOST_OVERLAPPED_PIECES = 400
# Number of equal pieces in the search for cuts; more would be finer than the model's accuracy.
_MOST_PIECES = 200


@dataclasses.dataclass(frozen=True)
class Link:
    """The link between two neighbours of the ring, and the speed of their hosts.

    The last four numbers are ours. `efficiency`: of 1538 bytes of an Ethernet frame and its gap, 1448 are payload.
    `host_bytes_per_sec`: packing, adding up and unpacking by Gloo on one processor core; two ranks on a machine of two
    cores needed 60 ms for 80 MB beyond the time on the wire. `transfer_overhead_secs`: Horovod looks for new
    collectives once in a millisecond. `message_overhead_secs`: waking up a thread at both ends.

    Attributes:
      bytes_per_sec: nominal rate of the link.
      latency_secs: one way; half of ping's time.
    """

    bytes_per_sec: float
    latency_secs: float
    efficiency: float = 0.94
    host_bytes_per_sec: float = 1.5e9
    transfer_overhead_secs: float = 1e-3
    message_overhead_secs: float = 20e-6


@dataclasses.dataclass(frozen=True)
class Training:
    """A step of one rank.

    Attributes:
      gradient_bytes: bytes of all gradients, in their computed dtype.
      compute_secs: time of the step on one rank, without communication.
      tensors: number of gradients; a fragment holds at least one.
      wire_share: bytes on the wire for each byte of a gradient: 1, or 0.5 for float32 that is sent in 16 bits.
    """

    gradient_bytes: float
    compute_secs: float = 0.0
    tensors: int = 100
    wire_share: float = 1.0


class Prediction(NamedTuple):
    """A step on a number of ranks; times in seconds.

    Attributes:
      ranks: number of ranks.
      communication_secs: all gradients in one fragment, without overlap.
      default_step_secs: the step with the default split.
      step_secs: the step with the best split.
      exposed_secs: its communication that no computation covers.
      percentages: the best split, shares of the gradients' bytes in the order they become ready.
      overlapped_secs: one of many steps, when each begins while the previous step's gradients are all-reduced, as with
        `iterations_per_loop`; None if that gains nothing over `default_step_secs`, so that it is not done.
    """

    ranks: int
    communication_secs: float
    default_step_secs: float
    step_secs: float
    exposed_secs: float
    percentages: tuple[float, ...]
    overlapped_secs: float | None = None


def transfer_secs(gradient_bytes: float, ranks: int, training: Training, link: Link) -> float:
    """Returns the time to sum gradients over the ranks in one all-reduce; 0.0 on one rank.

    Before it, the ranks agree that all of them are ready: two rounds of the same ring with hardly any bytes.
    """
    if ranks == 1:
        return 0.0
    agreement = link.transfer_overhead_secs + 4 * (ranks - 1) * (link.latency_secs + link.message_overhead_secs)
    return agreement + _ring_secs(gradient_bytes, ranks, training, link) + _host_secs(gradient_bytes, ranks, link)


def _ring_secs(gradient_bytes: float, ranks: int, training: Training, link: Link) -> float:
    """Returns the time of an all-reduce on the wire; 0.0 on one rank."""
    on_link = gradient_bytes * training.wire_share / ranks / (link.bytes_per_sec * link.efficiency)
    return 2 * (ranks - 1) * (link.latency_secs + link.message_overhead_secs + on_link)


def _host_secs(gradient_bytes: float, ranks: int, link: Link) -> float:
    """Returns the time in which a host packs gradients, adds them up and unpacks them; 0.0 on one rank."""
    return gradient_bytes / link.host_bytes_per_sec if ranks > 1 else 0.0


def step_secs(shares: Sequence[float], ranks: int, training: Training, link: Link) -> float:
    """Returns the time of a step whose gradients are all-reduced in fragments.

    Gradients become ready evenly by bytes during the backward pass.

    Args:
      shares: of the gradients' bytes, one per fragment, in the order they become ready; they sum to 1.
    """
    arrived = start = 0.0
    flight = _flight_share(ranks, training)
    for share in shares:
        length, earliest = _fragment_secs(start, start + share, flight, ranks, training, link)
        arrived = max(arrived + length, earliest)
        start += share
    return max(arrived, training.compute_secs)


def _fragment_secs(
    start: float, end: float, flight: float, ranks: int, training: Training, link: Link
) -> tuple[float, float]:
    """Models one fragment, the bytes from share `start` to share `end`; a share of `flight` goes in one all-reduce.

    Returns:
      The time of its all-reduces one after the other, and when they end if none ran before. They become ready at equal
      intervals, so either the first, the last or the last full one decides.
    """
    full = math.ceil((end - start) / flight - 1e-9) - 1
    rest = end - start - full * flight
    full_secs = transfer_secs(flight * training.gradient_bytes, ranks, training, link)
    rest_secs = transfer_secs(rest * training.gradient_bytes, ranks, training, link)
    length = full * full_secs + rest_secs
    earliest = _ready_secs(end, training) + rest_secs
    if full:
        earliest = max(earliest, _ready_secs(start + flight, training) + length)
        earliest = max(earliest, _ready_secs(end - rest, training) + full_secs + rest_secs)
    return length, earliest


def _flight_share(ranks: int, training: Training) -> float:
    """Returns the share of the bytes in one all-reduce: as many whole gradients as fit, at least one."""
    gradient_bytes = training.gradient_bytes * training.wire_share / training.tensors
    return max(1, math.floor(flight_bytes(ranks) / gradient_bytes)) / training.tensors


def overlapped_step_secs(ranks: int, training: Training, link: Link) -> float:
    """Returns the time of one of many steps that each begin while the previous step's gradients are all-reduced.

    The forward pass of a layer waits only for this layer's last gradients. Gradients that are sent during the backward
    pass go in its order, the others in the order of the forward pass. The ranks agree about an all-reduce while the
    previous one is running. All gradients count as equally large, and the computation as spread evenly over them.
    """
    gradient_bytes = training.gradient_bytes * training.wire_share / training.tensors
    transfers = math.ceil(training.tensors / max(1, math.floor(flight_bytes(ranks, overlaps=True) / gradient_bytes)))
    pieces = min(transfers, _MOST_OVERLAPPED_PIECES)
    sent_bytes = training.gradient_bytes / transfers
    secs = (_ring_secs(sent_bytes, ranks, training, link) + _host_secs(sent_bytes, ranks, link)) * transfers / pieces
    forward = training.compute_secs * FORWARD_SHARE / pieces
    backward = training.compute_secs / pieces - forward
    early = min(math.ceil((pieces - 1) * backward / secs), pieces) if secs else pieces
    order = [*reversed(range(pieces - early, pieces)), *range(pieces - early)]  # piece 0 belongs to the first layers
    arrived = [0.0] * pieces
    computed = sent = 0.0
    ends = []
    for _ in range(_OVERLAPPED_STEPS):
        for piece in range(pieces):
            computed = max(computed, arrived[piece]) + forward
        ready = [computed + backward * (pieces - piece) for piece in range(pieces)]
        computed = ready[0]
        for piece in order:
            sent = arrived[piece] = max(sent, ready[piece]) + secs
        ends.append(max(computed, sent))
    return (ends[-1] - ends[1]) / (len(ends) - 2)


def best_cut(ranks: int, training: Training, link: Link, most_fragments: int = MOST_FRAGMENTS) -> list[int]:
    """Returns the cut of equal pieces into fragments with the shortest step: the number of pieces in each.

    Of cuts close to the best one, the one with the fewest fragments wins. The search is exact: a fragment depends on
    earlier ones only through their arrival time, so the best cut into k fragments ends in a best cut into k - 1.
    """
    pieces = min(training.tensors, _MOST_PIECES)
    if ranks == 1:
        return [pieces]
    flight = _flight_share(ranks, training)
    shares = [count / pieces for count in range(pieces + 1)]
    fragments = {
        (start, end): _fragment_secs(shares[start], shares[end], flight, ranks, training, link)
        for start, end in itertools.combinations(range(pieces + 1), 2)
    }
    arrivals = [[0.0, *(fragments[0, end][1] for end in range(1, pieces + 1))]]
    starts: list[list[int]] = [[0] * (pieces + 1)]
    for _ in range(1, min(most_fragments, pieces)):
        row = [_earliest(end, arrivals[-1], fragments) for end in range(pieces + 1)]
        arrivals.append([arrived for arrived, _ in row])
        starts.append([start for _, start in row])
    times = [max(row[pieces], training.compute_secs) for row in arrivals]
    fewest = next(number for number, secs in enumerate(times) if secs <= min(times) * _CLOSE_ENOUGH)
    return _trace(starts, fewest, pieces)


def predict(ranks: int, training: Training, link: Link) -> Prediction:
    """Predicts the step on a number of ranks, with the best split and with the default one."""
    percentages = _percentages(best_cut(ranks, training, link))
    default = DEFAULT_PERCENTAGES if training.tensors > 1 else (100.0,)
    secs = step_secs(_whole_gradients(percentages, training), ranks, training, link)
    default_secs = step_secs(_whole_gradients(default, training), ranks, training, link)
    return Prediction(
        ranks,
        _fragment_secs(0.0, 1.0, _flight_share(ranks, training), ranks, training, link)[0],
        default_secs,
        secs,
        secs - training.compute_secs,
        percentages,
        _gaining_overlap(default_secs, ranks, training, link),
    )


def _gaining_overlap(one_by_one_secs, ranks, training, link):
    """Returns the time of a step that overlaps with the next one; None if it gains nothing."""
    if not training.compute_secs or one_by_one_secs - training.compute_secs < LEAST_WAIT * one_by_one_secs:
        return None
    secs = overlapped_step_secs(ranks, training, link)
    return secs if secs < (1 - LEAST_GAIN) * one_by_one_secs else None


def _ready_secs(share: float, training: Training) -> float:
    """Returns when this share of the gradients is computed."""
    return training.compute_secs * (FORWARD_SHARE + (1.0 - FORWARD_SHARE) * share)


def _earliest(end, arrivals, fragments):
    """Returns when `end` pieces can have arrived, given the arrivals with one fragment less, and the last start."""
    best, best_start = math.inf, 0
    for start in range(1, end):
        length, earliest = fragments[start, end]
        arrived = max(arrivals[start] + length, earliest)
        if arrived < best:
            best, best_start = arrived, start
    return best, best_start


def _trace(starts, number, end):
    """Returns the pieces of each fragment: follows the table of best starts from the last fragment to the first."""
    sizes = []
    for row in reversed(starts[: number + 1]):
        sizes.append(end - row[end])
        end = row[end]
    return sizes[::-1]


def _whole_gradients(percentages: Sequence[float], training: Training) -> list[float]:
    """Returns the shares of the fragments that these percentages really cut, since a gradient is never cut.

    Two decimals are too coarse for shares: a tiny excess would add an all-reduce.
    """
    cut = cut_by_size([1] * training.tensors, percentages)
    return [len(fragment) / training.tensors for fragment in cut]


def _percentages(sizes: Sequence[int]) -> tuple[float, ...]:
    """Returns shares with two decimals that sum to exactly 100."""
    hundredths = [10_000 * total // sum(sizes) for total in itertools.accumulate(sizes, initial=0)]
    return tuple((after - before) / 100 for before, after in zip(hundredths, hundredths[1:]))
