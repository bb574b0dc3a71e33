"""Defines the classes of an option and of the table that holds all options.

An `Option` is written once, in one of the `table_*.py` modules. Constructor signatures, validation, the session's
`parameter_map`, `TrainingOptions`, configuration files and `docs/options.md` are all derived from the table.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from npu_bridge.base.errors import message, option_error, say_once, shortened, shown, unknown_name_error
from npu_bridge.options.kinds import Helper, Kind, TensorFlowObject

RUN_CONFIG = "NPURunConfig"
PROFILING = "ProfilingConfig"
DUMP = "DumpConfig"
MEMORY = "MemoryConfig"
DYNAMIC_INPUT = "DynamicInputConfig"
EXPERIMENTAL = "ExperimentalConfig"
GRAPH_MEMORY = "GraphMemoryOptimizeConfig"
SESSION = "session"

REQUIRED = inspect.Parameter.empty


class Effect(NamedTuple):
    """The effect of an option here, and a note.

    The level is `works` (as documented), `recorded` (checked and kept) or `refused` (any value but the default).
    """

    level: str
    note: str = ""

    @property
    def in_words(self) -> str:
        """Level and note in one text."""
        return f"{self.level}: {self.note}" if self.note else self.level


works, recorded, refused = (functools.partial(Effect, level) for level in ("works", "recorded", "refused"))
_SAME_AS_NAME = "<name>"
_SAME_AS_DEFAULT = object()


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
      position: 1-based place in its owner's constructor; order of listing for session-only options.
      name: keyword in the owner's constructor, and field of `TrainingOptions`.
      kind: the values it takes.
      doc: one line with its meaning on the NPU stack.
      effect: its effect here.
      default: constructor default; `REQUIRED` when there is none.
      owner: class whose constructor takes it, or `SESSION` for options only a session's parameter_map has.
      attribute: attribute of the config object holding the value; `_<name>` when not given.
      status: documented, deprecated, undocumented, or unsupported (documented as not to be set).
      replaced_by: for deprecated options, the option to use instead.
      key: name in the session's parameter_map; None when a session cannot set it.
      absent: value when the parameter_map lacks the key; the default when not given.
      accepts_none: whether None is legal and means "not set"; by default when the default is None.
      needs: another option that must be set for this one to be sent to a session.
      sent_without_helper: for helper options, whether the default is sent when the helper object is None.
      variable: environment variable that counts when neither the object nor the map sets the option.
      strict_slot: whether a value in the wrong AttrValue slot is an error ("error"), skipped ("skip") or, if it has a
        meaning there, read with a warning ("warn").
      former_owner: class whose constructor took it on older NPU stacks; there it is left out with a warning.
    """

    position: int
    name: str
    kind: Kind
    doc: str
    effect: Effect = Effect("recorded")
    default: Any = None
    owner: str = RUN_CONFIG
    attribute: str = ""
    status: str = "documented"
    replaced_by: str = ""
    key: str | None = _SAME_AS_NAME
    absent: Any = _SAME_AS_DEFAULT
    accepts_none: bool | None = None
    needs: str = ""
    sent_without_helper: bool = False
    variable: str = ""
    strict_slot: str = "warn"
    former_owner: str = ""

    def __post_init__(self) -> None:
        fill = functools.partial(object.__setattr__, self)
        if not self.attribute:
            fill("attribute", f"_{self.name}")
        if self.key == _SAME_AS_NAME:
            fill("key", self.name if self.kind.session_field else None)
        if self.absent is _SAME_AS_DEFAULT:
            fill("absent", None if self.default is REQUIRED else self.default)
        if self.accepts_none is None:
            fill("accepts_none", self.default is None or self.default is REQUIRED)

    @property
    def is_plain(self) -> bool:
        """Whether the value is plain data, not an object of TensorFlow or a helper object."""
        return not isinstance(self.kind, (Helper, TensorFlowObject))

    @property
    def expected(self) -> str:
        """The legal values, as the noun phrase of a sentence."""
        return self.kind.expected + (" or None" if self.accepts_none else "")

    def check(self, value: Any, place: Place, *, only_type: bool = False) -> None:
        """Raises when `value` is illegal; warns once when it is outside limits that are not enforced.

        Args:
          value: the user's value.
          place: where it was given.
          only_type: check only the type.
        Raises:
          TypeError: the type is wrong (ValueError for the options documented so).
          ValueError: the value is wrong.
        """
        if value is None and self.accepts_none:
            return
        problem = self.kind.problem(value)
        if problem is None or (only_type and problem.says != "has the wrong type"):
            return
        words = (f"{place.spelling(self)} {problem.says}", self.expected, shown(value), problem.fix)
        if problem.is_fatal:
            raise option_error(problem.error, place.where(self), self.name, *words)
        say_once(logging.WARNING, message(place.where(self), *words))

    def normalise(self, value: Any) -> Any:
        """Returns the plain form of a legal value; `absent` for None, and for empty text that means "not set"."""
        if value is None:
            return self.absent
        plain = self.kind.normalise(value)
        return self.absent if plain == "" else plain


class Place(NamedTuple):
    """The place where the user set an option, so that messages use the user's spelling.

    Attributes:
      is_session: whether it was in a session's parameter_map.
      function: the function that took it as a keyword, or "".
    """

    is_session: bool
    function: str = ""

    def where(self, option: Option) -> str:
        """Returns the function, object or map the option was given to."""
        if self.function:
            return self.function
        return "NpuOptimizer parameter_map" if self.is_session or option.owner == SESSION else option.owner

    def spelling(self, option: Option) -> str:
        """Returns the option's name there."""
        return (option.key if self.is_session else option.name) or option.name


class UnknownKeyError(ValueError):
    """An error for a session key that no option has."""


IN_OBJECT = Place(is_session=False)
IN_SESSION = Place(is_session=True)


class OptionTable:
    """All options, looked up by name, by owner and by session key."""

    def __init__(self, options: Iterable[Option]):
        """Args: options: in any order; unique in name and key, contiguous in position for each owner."""
        self._options = tuple(sorted(options, key=lambda option: (option.owner, option.position)))
        self._by_name = {option.name: option for option in self._options}
        self._by_key = {option.key: option for option in self._options if option.key}
        if len(self._by_name) != len(self._options):
            raise ValueError("options: a name is declared twice. Give each option its own name.")
        if len(self._by_key) != sum(1 for option in self._options if option.key):
            raise ValueError("options: a session key is declared twice. Give each option its own key.")
        for owner in {option.owner for option in self._options}:
            positions = [option.position for option in self.of(owner)]
            if positions != list(range(1, len(positions) + 1)):
                raise ValueError(f"options: positions of {owner} are not contiguous; got {positions}. Renumber them.")

    def __iter__(self):
        return iter(self._options)

    def __getitem__(self, name: str) -> Option:
        return self._by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def of(self, owner: str) -> tuple[Option, ...]:
        """Returns the options of one owner in constructor order."""
        return tuple(option for option in self._options if option.owner == owner)

    def by_key(self, key: str) -> Option:
        """Returns the option with this key in a session's parameter_map.

        Raises:
          UnknownKeyError: (a ValueError) no option has this key.
        """
        if key not in self._by_key:
            own = self._by_name.get(key)
            fix = f"Its session key is {own.key!r}." if own and own.key else ""
            raise unknown_name_error(UnknownKeyError, "NpuOptimizer parameter_map", key, self._by_key, fix)
        return self._by_key[key]

    def unknown(self, kind: type[Exception], owner: str, name: str) -> Exception:
        """Returns the error for a name an owner does not have; names another owner that has it."""
        other = self._by_name.get(name)
        fix = f"It belongs to {other.owner}." if other else ""
        return unknown_name_error(kind, owner, name, [option.name for option in self.of(owner)], fix)

    def adding(self, *options: Option) -> OptionTable:
        """Returns a table that also holds these options."""
        return OptionTable((*self._options, *options))

    def signature(self, owner: str) -> inspect.Signature:
        """Returns the constructor signature of an owner, `self` included."""
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter("self", kind)]
        parameters += [inspect.Parameter(o.name, kind, default=o.default) for o in self.of(owner)]
        return inspect.Signature(parameters)

    def bind(self, owner: str, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Binds a constructor call: returns values by name, with defaults filled in.

        Raises:
          TypeError: an unknown keyword, too many positional values, or a missing required one.
        """
        names = [option.name for option in self.of(owner)]
        for name in [name for name in kwargs if name not in names]:
            if name not in self or self[name].former_owner != owner:
                raise self.unknown(TypeError, owner, name)
            problem = f"{name} is a keyword of older NPU stacks and is left out"
            kwargs = {**kwargs}
            value = kwargs.pop(name)
            say_once(logging.WARNING, message(owner, problem, "no such keyword", shown(value), "Remove it."))
        try:
            bound = self.signature(owner).bind(None, *args, **kwargs)
        except TypeError as error:
            raise TypeError(shortened(f"{owner}: {error}. Its parameters are {', '.join(names)}.")) from None
        bound.apply_defaults()
        return {name: bound.arguments[name] for name in names}
