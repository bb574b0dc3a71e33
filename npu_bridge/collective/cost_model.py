"""Models the time of a training step on n ranks: an alpha-beta model of ring all-reduces that overlap a backward pass.

Summing B bytes over n ranks in a ring takes 2 (n - 1) messages one after the other, each of B / n bytes:

    transfer = overhead + 2 (n - 1) (latency + B / (n bandwidth)) + B / host rate

An all-reduce starts when its last gradient is ready and the previous all-reduce has finished. Communication after the
end of the computation is exposed; the rest is hidden. A fragment is one all-reduce, or several if it is large
(`split_large_fragments`). Overlapping steps are simulated one after the other, all-reduce by all-reduce. The model is
pure arithmetic, without TensorFlow or Horovod.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from npu_bridge.collective.fragments import DEFAULT_PERCENTAGES, all_reduce_bytes, split_by_size

# The most fragments of the documented split strategies.
MOST_FRAGMENTS = 8
# A backward pass computes two products for each product of the forward pass.
FORWARD_SHARE = 1.0 / 3.0
# Splits within this factor of the best time count as equal; among them the split with the fewest fragments is chosen.
_CLOSE_ENOUGH = 1.005
# Overlapping steps gain at most the time for which ranks wait for the network after the backward pass, usually half of
# it. They are tried if ranks wait for LEAST_WAIT of a step, and kept if they gain LEAST_GAIN, the noise of a trial.
LEAST_WAIT = 0.1
# Steps overlap in calls of more steps than this: the last step of a call overlaps with no other.
LEAST_STEPS = 4
LEAST_GAIN = 0.01
# The first of these steps differ: no earlier gradients are arriving.
_OVERLAPPED_STEPS = 6
_MOST_OVERLAPPED_PIECES = 400
# Number of equal pieces in the search for the best split; more would be finer than the model's accuracy.
_MOST_PIECES = 200


@dataclasses.dataclass(frozen=True)
class NetworkLink:
    """The link between two neighbours of the ring, and the speed of their hosts.

    Attributes:
      bytes_per_sec: nominal rate of the link.
      latency_secs: latency in one direction; half of the time that `ping` shows.
      efficiency: payload as a share of the bytes; in Ethernet, 1448 of the 1538 bytes of a frame and its gap.
      host_bytes_per_sec: rate at which Gloo packs, sums and unpacks on one core; two ranks on a machine of two cores
        needed 60 ms for 80 MB beyond the time on the wire.
      transfer_overhead_secs: delay of each all-reduce; Horovod looks for new collectives once in a millisecond.
      message_overhead_secs: time to wake up a thread at both ends.
    """

    bytes_per_sec: float
    latency_secs: float
    efficiency: float = 0.94
    host_bytes_per_sec: float = 1.5e9
    transfer_overhead_secs: float = 1e-3
    message_overhead_secs: float = 20e-6


@dataclasses.dataclass(frozen=True)
class TrainingCosts:
    """The training whose steps are modelled.

    Attributes:
      gradient_bytes: bytes of all gradients, in their computed dtype.
      compute_secs: time of the step on one rank, without communication.
      tensors: number of gradients; a fragment has at least one gradient.
      wire_share: bytes sent for each byte of a gradient: 1, or 0.5 for float32 gradients that are sent in 16 bits.
    """

    gradient_bytes: float
    compute_secs: float = 0.0
    tensors: int = 100
    wire_share: float = 1.0


class StepPrediction(NamedTuple):
    """The predicted times of a step on a number of ranks, in seconds.

    Attributes:
      ranks: number of ranks.
      communication_secs: time to all-reduce all gradients in one fragment, without overlap.
      default_step_secs: time of the step with the default split.
      step_secs: time of the step with the best split.
      exposed_secs: communication time with the best split that no computation hides.
      percentages: the best split: shares of the gradients' bytes, in the order in which gradients become ready.
      overlapped_secs: time of one of many steps that each begin while the previous step's gradients are all-reduced, as
        with `iterations_per_loop`; None if that is no faster than `default_step_secs`.
    """

    ranks: int
    communication_secs: float
    default_step_secs: float
    step_secs: float
    exposed_secs: float
    percentages: tuple[float, ...]
    overlapped_secs: float | None = None


def transfer_secs(gradient_bytes: float, ranks: int, training: TrainingCosts, link: NetworkLink) -> float:
    """Returns the time to sum gradients over the ranks in one all-reduce; 0.0 on one rank.

    Includes the agreement that all ranks are ready: two rounds of the ring with almost no bytes.
    """
    if ranks == 1:
        return 0.0
    agreement = link.transfer_overhead_secs + 4 * (ranks - 1) * (link.latency_secs + link.message_overhead_secs)
    return agreement + _ring_secs(gradient_bytes, ranks, training, link) + _host_work_secs(gradient_bytes, ranks, link)


def _ring_secs(gradient_bytes: float, ranks: int, training: TrainingCosts, link: NetworkLink) -> float:
    """Returns the time of an all-reduce on the wire; 0.0 on one rank."""
    on_link = gradient_bytes * training.wire_share / ranks / (link.bytes_per_sec * link.efficiency)
    return 2 * (ranks - 1) * (link.latency_secs + link.message_overhead_secs + on_link)


def _host_work_secs(gradient_bytes: float, ranks: int, link: NetworkLink) -> float:
    """Returns the time for which a host packs, sums and unpacks gradients; 0.0 on one rank."""
    return gradient_bytes / link.host_bytes_per_sec if ranks > 1 else 0.0


def step_secs(fragment_shares: Sequence[float], ranks: int, training: TrainingCosts, link: NetworkLink) -> float:
    """Returns the time of a step whose gradients are all-reduced in fragments.

    The model assumes that the backward pass computes equally many bytes of gradients at any time.

    Args:
      fragment_shares: share of the gradients' bytes in each fragment, in the order in which they become ready; they sum
        to 1.
    """
    arrived = start = 0.0
    flight = _max_share_of_one_all_reduce(ranks, training)
    for share in fragment_shares:
        length, earliest = _fragment_secs(start, start + share, flight, ranks, training, link)
        arrived = max(arrived + length, earliest)
        start += share
    return max(arrived, training.compute_secs)


def _fragment_secs(
    start_share: float,
    end_share: float,
    all_reduce_share: float,
    ranks: int,
    training: TrainingCosts,
    link: NetworkLink,
) -> tuple[float, float]:
    """Models a fragment that is sent in several all-reduces.

    Args:
      start_share, end_share: shares of all bytes at which the fragment begins and ends.
      all_reduce_share: share of all bytes in one full all-reduce.
    Returns:
      The total time of the fragment's all-reduces, and the earliest time at which they can end. All-reduces become
      ready at equal intervals, so the first, the last or the last full all-reduce determines the end.
    """
    full = math.ceil((end_share - start_share) / all_reduce_share - 1e-9) - 1
    rest = end_share - start_share - full * all_reduce_share
    full_secs = transfer_secs(all_reduce_share * training.gradient_bytes, ranks, training, link)
    rest_secs = transfer_secs(rest * training.gradient_bytes, ranks, training, link)
    length = full * full_secs + rest_secs
    earliest = _gradients_ready_secs(end_share, training) + rest_secs
    if full:
        earliest = max(earliest, _gradients_ready_secs(start_share + all_reduce_share, training) + length)
        earliest = max(earliest, _gradients_ready_secs(end_share - rest, training) + full_secs + rest_secs)
    return length, earliest


def _max_share_of_one_all_reduce(ranks: int, training: TrainingCosts) -> float:
    """Returns the largest share of the bytes that one all-reduce can hold: whole gradients, at least one."""
    gradient_bytes = training.gradient_bytes * training.wire_share / training.tensors
    return max(1, math.floor(all_reduce_bytes(ranks) / gradient_bytes)) / training.tensors


def overlapped_step_secs(ranks: int, training: TrainingCosts, link: NetworkLink) -> float:
    """Returns the time of one of many steps that each begin while the previous step's gradients are all-reduced.

    The forward pass of a layer waits only for this layer's previous gradients. Gradients are sent in the order of the
    backward pass while it runs, and then in the order of the forward pass. The ranks agree about an all-reduce while
    the previous all-reduce is running. All gradients count as equally large, with equally much computation.
    """
    gradient_bytes = training.gradient_bytes * training.wire_share / training.tensors
    transfers = math.ceil(
        training.tensors / max(1, math.floor(all_reduce_bytes(ranks, overlaps_next_step=True) / gradient_bytes))
    )
    pieces = min(transfers, _MOST_OVERLAPPED_PIECES)
    sent_bytes = training.gradient_bytes / transfers
    secs = (
        (_ring_secs(sent_bytes, ranks, training, link) + _host_work_secs(sent_bytes, ranks, link)) * transfers / pieces
    )
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


def best_split(
    ranks: int, training: TrainingCosts, link: NetworkLink, most_fragments: int = MOST_FRAGMENTS
) -> list[int]:
    """Returns the split into fragments for which a step is shortest: for each fragment, how many equal pieces it has.

    The gradients are divided into up to `_MOST_PIECES` equal pieces.

    Among splits that are almost as fast as the best one, chooses the split with the fewest fragments. The search is
    exact: a fragment depends on earlier fragments only through their arrival time, so a best split into k fragments
    contains a best split into k - 1 fragments.
    """
    pieces = min(training.tensors, _MOST_PIECES)
    if ranks == 1:
        return [pieces]
    flight = _max_share_of_one_all_reduce(ranks, training)
    shares = [count / pieces for count in range(pieces + 1)]
    fragments = {
        (start, end): _fragment_secs(shares[start], shares[end], flight, ranks, training, link)
        for start, end in itertools.combinations(range(pieces + 1), 2)
    }
    arrivals = [[0.0, *(fragments[0, end][1] for end in range(1, pieces + 1))]]
    starts: list[list[int]] = [[0] * (pieces + 1)]
    for _ in range(1, min(most_fragments, pieces)):
        row = [_earliest_arrival(end, arrivals[-1], fragments) for end in range(pieces + 1)]
        arrivals.append([arrived for arrived, _ in row])
        starts.append([start for _, start in row])
    times = [max(row[pieces], training.compute_secs) for row in arrivals]
    fewest = next(number for number, secs in enumerate(times) if secs <= min(times) * _CLOSE_ENOUGH)
    return _fragment_sizes(starts, fewest, pieces)


def predict_step_time(ranks: int, training: TrainingCosts, link: NetworkLink) -> StepPrediction:
    """Predicts the time of a step on a number of ranks, with the best split and with the default split."""
    percentages = _percentages(best_split(ranks, training, link))
    default = DEFAULT_PERCENTAGES if training.tensors > 1 else (100.0,)
    secs = step_secs(_shares_of_whole_gradients(percentages, training), ranks, training, link)
    default_secs = step_secs(_shares_of_whole_gradients(default, training), ranks, training, link)
    return StepPrediction(
        ranks,
        _fragment_secs(0.0, 1.0, _max_share_of_one_all_reduce(ranks, training), ranks, training, link)[0],
        default_secs,
        secs,
        secs - training.compute_secs,
        percentages,
        _overlapped_secs_if_faster(default_secs, ranks, training, link),
    )


def _overlapped_secs_if_faster(one_by_one_secs, ranks, training, link):
    """Returns the time of a step that overlaps with the next step; None if overlapping gains nothing."""
    if not training.compute_secs or one_by_one_secs - training.compute_secs < LEAST_WAIT * one_by_one_secs:
        return None
    secs = overlapped_step_secs(ranks, training, link)
    return secs if secs < (1 - LEAST_GAIN) * one_by_one_secs else None


def _gradients_ready_secs(share: float, training: TrainingCosts) -> float:
    """Returns the time at which this share of the gradients has been computed."""
    return training.compute_secs * (FORWARD_SHARE + (1.0 - FORWARD_SHARE) * share)


def _earliest_arrival(end, arrivals, fragments):
    """Returns the earliest time at which the first `end` pieces arrive, and where their last fragment begins.

    `arrivals` has these times for splits with one fragment less; `fragments` has the results of `_fragment_secs`.
    """
    best, best_start = math.inf, 0
    for start in range(1, end):
        length, earliest = fragments[start, end]
        arrived = max(arrivals[start] + length, earliest)
        if arrived < best:
            best, best_start = arrived, start
    return best, best_start


def _fragment_sizes(starts, number, end):
    """Returns the number of pieces of each fragment; if fragment i ends at piece e, it begins at `starts[i][e]`."""
    sizes = []
    for row in reversed(starts[: number + 1]):
        sizes.append(end - row[end])
        end = row[end]
    return sizes[::-1]


def _shares_of_whole_gradients(percentages: Sequence[float], training: TrainingCosts) -> list[float]:
    """Returns the share of the gradients in each fragment, which holds whole gradients only.

    Percentages with two decimals are too coarse as shares: a fragment a little too large for one all-reduce would take
    two.
    """
    cut = split_by_size([1] * training.tensors, percentages)
    return [len(fragment) / training.tensors for fragment in cut]


def _percentages(sizes: Sequence[int]) -> tuple[float, ...]:
    """Returns the percentage of each size, with two decimals; they sum to exactly 100."""
    hundredths = [10_000 * total // sum(sizes) for total in itertools.accumulate(sizes, initial=0)]
    return tuple((after - before) / 100 for before, after in zip(hundredths, hundredths[1:]))
