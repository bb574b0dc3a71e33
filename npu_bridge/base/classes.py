"""Changes the class of existing objects; the only place that does."""

from __future__ import annotations

from typing import Any


def change_class(instance: Any, new_class: type) -> None:
    """Changes an object's class in place, so that everything that holds the object sees the change.

    Args:
      instance: such as a session, or a layer of a user's model.
      new_class: a subclass of its class or of the same base, without `__slots__`; its constructor is not called.
    """
    instance.__class__ = new_class
