"""Changes the class of objects that others have made; the only place that does."""

from __future__ import annotations

from typing import Any


def change_class(instance: Any, new_class: type) -> None:
    """Makes an object one of another class where it stands, so that whoever holds it sees the change.

    Args:
      instance: such as a session, or a layer of somebody's model.
      new_class: a subclass of its class or of the same base, without `__slots__`; its constructor is not called.
    """
    instance.__class__ = new_class
