"""Keeps the flat tensor that tensors were split from, so that nobody has to concatenate them again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

_MARK = "_npu_bridge_piece"


class Piece(NamedTuple):
    """Where a tensor lies.

    Attributes:
      flat: a vector.
      start: position of the tensor's first element in it.
      count: how many pieces the vector has.
    """

    flat: Any
    start: int
    count: int


def joined(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """The elements of tensors of one dtype, one tensor after the other, as a vector."""
    return tf.concat([tensor if tensor.shape.rank == 1 else tf.reshape(tensor, [-1]) for tensor in tensors], 0)


def cut_pieces(flat: tf.Tensor, shapes: Sequence[tf.TensorShape]) -> list:
    """A vector cut into tensors of static shapes, which remember where they come from."""
    sizes = [shape.num_elements() for shape in shapes]
    made, start = [], 0
    for part, shape, size in zip(tf.split(flat, sizes), shapes, sizes):
        piece = tf.identity(part) if shape.rank == 1 else tf.reshape(part, shape)
        setattr(piece, _MARK, Piece(flat, start, len(sizes)))
        made.append(piece)
        start += size
    return made


def run_of(tensors: Sequence[Any]) -> tf.Tensor | None:
    """The part of a flat tensor that tensors are when they lie in it one after the other; None when they do not."""
    places = [getattr(tensor, _MARK, None) for tensor in tensors]
    if not places or places[0] is None:
        return None
    flat, first, _ = places[0]
    start = first
    for tensor, place in zip(tensors, places):
        if place is None or place.flat is not flat or place.start != start:
            return None
        start += tensor.shape.num_elements()
    is_whole = first == 0 and start == flat.shape.num_elements()
    return flat if is_whole else tf.slice(flat, [first], [start - first])


def mapped(tensors: Sequence[Any], transform: Callable[[Any], Any]) -> list:
    """What a transform that treats each element by itself makes of tensors: of a flat one, at once for all its pieces.

    Args:
      tensors: tensors, or other things that `transform` takes.
    """
    made, wholes = [], {id(flat) for flat in with_flats(tensors)}
    of_flats: dict[int, dict] = {}
    for tensor in tensors:
        place = getattr(tensor, _MARK, None)
        if place is None or id(place.flat) not in wholes:
            made.append(transform(tensor))
            continue
        if id(place.flat) not in of_flats:
            places = {other.start: each for each in tensors if (other := _place_in(each, place.flat)) is not None}
            starts = sorted(places)
            pieces = cut_pieces(transform(place.flat), [places[start].shape for start in starts])
            of_flats[id(place.flat)] = dict(zip(starts, pieces))
        made.append(of_flats[id(place.flat)][place.start])
    return made


def _place_in(tensor, flat):
    place = getattr(tensor, _MARK, None)
    return place if place is not None and place.flat is flat else None


def with_flats(tensors: Sequence[Any]) -> list:
    """The tensors, but a flat one in the place of all of its pieces where all of them are there."""
    places = [getattr(tensor, _MARK, None) for tensor in tensors]
    found: dict[int, list] = {}
    for place in places:
        if place is not None:
            found.setdefault(id(place.flat), []).append(place)
    made, taken = [], set()
    for tensor, place in zip(tensors, places):
        if place is None or len({other.start for other in found[id(place.flat)]}) < place.count:
            made.append(tensor)
        elif id(place.flat) not in taken:
            taken.add(id(place.flat))
            made.append(place.flat)
    return made
