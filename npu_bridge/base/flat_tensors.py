"""Remembers the flat tensor that pieces were split from, so that the pieces need not be concatenated again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

_MARK = "_npu_bridge_piece"


class FlatPiece(NamedTuple):
    """The place of a tensor in a flat tensor.

    Attributes:
      flat: the flat tensor, a vector.
      start: position of the tensor's first element in `flat`.
      count: number of pieces that `flat` was split into.
    """

    flat: Any
    start: int
    count: int


def concatenate_flat(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Concatenates tensors of one dtype, flattened, to a vector."""
    return tf.concat([tensor if tensor.shape.rank == 1 else tf.reshape(tensor, [-1]) for tensor in tensors], 0)


def split_flat(flat: tf.Tensor, shapes: Sequence[tf.TensorShape]) -> list:
    """Splits a vector into tensors of static shapes, which remember their place in the vector."""
    sizes = [shape.num_elements() for shape in shapes]
    made, start = [], 0
    for part, shape, size in zip(tf.split(flat, sizes), shapes, sizes):
        piece = tf.identity(part) if shape.rank == 1 else tf.reshape(part, shape)
        setattr(piece, _MARK, FlatPiece(flat, start, len(sizes)))
        made.append(piece)
        start += size
    return made


def contiguous_slice(tensors: Sequence[Any]) -> tf.Tensor | None:
    """Returns the slice of a flat tensor that consists of these tensors in order; None if they are not contiguous."""
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


def map_elementwise(tensors: Sequence[Any], transform: Callable[[Any], Any]) -> list:
    """Applies an element-wise transform to tensors. All pieces of a flat tensor are transformed together.

    Args:
      tensors: tensors, or other objects that `transform` takes.
    """
    made, wholes = [], {id(flat) for flat in replace_pieces_by_flat_tensors(tensors)}
    of_flats: dict[int, dict] = {}
    for tensor in tensors:
        place = getattr(tensor, _MARK, None)
        if place is None or id(place.flat) not in wholes:
            made.append(transform(tensor))
            continue
        if id(place.flat) not in of_flats:
            places = {other.start: each for each in tensors if (other := _place_in_flat(each, place.flat)) is not None}
            starts = sorted(places)
            pieces = split_flat(transform(place.flat), [places[start].shape for start in starts])
            of_flats[id(place.flat)] = dict(zip(starts, pieces))
        made.append(of_flats[id(place.flat)][place.start])
    return made


def _place_in_flat(tensor, flat):
    place = getattr(tensor, _MARK, None)
    return place if place is not None and place.flat is flat else None


def replace_pieces_by_flat_tensors(tensors: Sequence[Any]) -> list:
    """Returns the tensors, with each flat tensor in place of its pieces if all of these pieces are present."""
    places = [getattr(tensor, _MARK, None) for tensor in tensors]
    found: dict[int, set] = {}
    for place in places:
        if place is not None:
            found.setdefault(id(place.flat), set()).add(place.start)
    made, taken = [], set()
    for tensor, place in zip(tensors, places):
        if place is None or len(found[id(place.flat)]) < place.count:
            made.append(tensor)
        elif id(place.flat) not in taken:
            taken.add(id(place.flat))
            made.append(place.flat)
    return made
