"""Defines the classes of an option and of the table of all options, which also refuses unknown options.

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
from npu_bridge.options.kinds import HelperObject, OptionKind, TensorFlowObject

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
    """The effect of an option here, with a note.

    `level` is `works` (as documented), `recorded` (checked and stored, without effect) or `refused` (only the default
    is legal).
    """

    level: str
    note: str = ""

    @property
    def in_words(self) -> str:
        """Level and note as one text."""
        return f"{self.level}: {self.note}" if self.note else self.level


works, recorded, refused = (functools.partial(Effect, level) for level in ("works", "recorded", "refused"))
_SAME_AS_NAME = "<name>"
_SAME_AS_DEFAULT = object()


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
      position: 1-based position in its owner's constructor; options of sessions alone are listed in this order.
      name: keyword in the owner's constructor, and field of `TrainingOptions`.
      kind: the kind of its values.
      doc: its meaning on the NPU stack, in one line.
      effect: its effect here.
      default: constructor default; `REQUIRED` when there is none.
      owner: class whose constructor has the option, or `SESSION` for options that only a session's parameter_map has.
      attribute: attribute of the config object that holds the value; by default `_<name>`.
      status: documented, deprecated, undocumented, or unsupported (documented as "do not set").
      replaced_by: for deprecated options, the option to use instead.
      key: name in the session's parameter_map; None when a session cannot set it.
      absent: value if the parameter_map lacks the key; by default the constructor default.
      accepts_none: whether None is legal and means "not set"; by default, whether the constructor default is None.
      needs: name of another option, which must be set for this option to be sent to a session.
      sent_without_helper: for options of a helper object (such as `DumpConfig`), whether a session gets the default
        if no helper object was given.
      variable: environment variable that sets the option if neither the config object nor the parameter_map does.
      strict_slot: treatment of a value in the wrong AttrValue slot: it is an error ("error"), is skipped ("skip"), or
        is converted with a warning if possible ("warn").
      former_owner: class whose constructor had the option on older NPU stacks; this constructor ignores it with a
        warning.
    """

    position: int
    name: str
    kind: OptionKind
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
    def has_plain_value(self) -> bool:
        """Whether the value is plain data, rather than a TensorFlow object or a helper object."""
        return not isinstance(self.kind, (HelperObject, TensorFlowObject))

    @property
    def expected(self) -> str:
        """The legal values, as a noun phrase."""
        return self.kind.expected + (" or None" if self.accepts_none else "")

    def check(self, value: Any, place: OptionSource, *, only_type: bool = False) -> None:
        """Raises an error if `value` is illegal. Warns once if it is outside of limits that are not enforced.

        Args:
          value: the user's value.
          place: the place where the value was given.
          only_type: check only the type.
        Raises:
          TypeError: the type is wrong. (Some kinds raise ValueError, as documented.)
          ValueError: the value is wrong.
        """
        if value is None and self.accepts_none:
            return
        problem = self.kind.find_problem(value)
        if problem is None or (only_type and problem.says != "has the wrong type"):
            return
        words = (f"{place.spelling(self)} {problem.says}", self.expected, shown(value), problem.fix)
        if problem.is_fatal:
            raise option_error(problem.error, place.holder_of(self), self.name, *words)
        say_once(logging.WARNING, message(place.holder_of(self), *words))

    def normalise(self, value: Any) -> Any:
        """Returns the plain form of a legal value; `absent` for None, and for an empty text, meaning "not set"."""
        if value is None:
            return self.absent
        plain = self.kind.normalise(value)
        return self.absent if plain == "" else plain


class OptionSource(NamedTuple):
    """The place where the user set an option; messages use the name that the option has there.

    Attributes:
      is_session: whether the place is a session's parameter_map.
      function: the function that took the option as a keyword, or "".
    """

    is_session: bool
    function: str = ""

    def holder_of(self, option: Option) -> str:
        """Returns the name of the function, object or map to which the option was given."""
        if self.function:
            return self.function
        return "NpuOptimizer parameter_map" if self.is_session or option.owner == SESSION else option.owner

    def spelling(self, option: Option) -> str:
        """Returns the option's name as a user writes it in this place."""
        return (option.key if self.is_session else option.name) or option.name


class UnknownKeyError(ValueError):
    """Raised for a key in a session's parameter_map that belongs to no option."""


IN_OBJECT = OptionSource(is_session=False)
IN_SESSION = OptionSource(is_session=True)


class OptionTable:
    """All options, looked up by name, by owner and by session key."""

    def __init__(self, options: Iterable[Option]):
        """Args: options: in any order. Names and keys must be unique, and the positions of each owner contiguous."""
        self._options = tuple(sorted(options, key=lambda option: (option.owner, option.position)))
        self._by_name = {option.name: option for option in self._options}
        self._by_key = {option.key: option for option in self._options if option.key}
        if len(self._by_name) != len(self._options):
            raise ValueError("options: a name is declared twice. Give each option its own name.")
        if len(self._by_key) != sum(1 for option in self._options if option.key):
            raise ValueError("options: a session key is declared twice. Give each option its own key.")
        for owner in {option.owner for option in self._options}:
            positions = [option.position for option in self.options_of(owner)]
            if positions != list(range(1, len(positions) + 1)):
                raise ValueError(f"options: positions of {owner} are not contiguous; got {positions}. Renumber them.")

    def __iter__(self):
        return iter(self._options)

    def __getitem__(self, name: str) -> Option:
        return self._by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def options_of(self, owner: str) -> tuple[Option, ...]:
        """Returns the options of one owner in constructor order."""
        return tuple(option for option in self._options if option.owner == owner)

    def option_by_key(self, key: str) -> Option:
        """Returns the option with a key in a session's parameter_map.

        Raises:
          UnknownKeyError: (a ValueError) no option has this key.
        """
        if key not in self._by_key:
            own = self._by_name.get(key)
            fix = f"Its session key is {own.key!r}." if own and own.key else ""
            raise unknown_name_error(UnknownKeyError, "NpuOptimizer parameter_map", key, self._by_key, fix)
        return self._by_key[key]

    def unknown_option_error(self, kind: type[Exception], owner: str, name: str) -> Exception:
        """Returns the error for a name that `owner` lacks; the error mentions another owner that has the name."""
        other = self._by_name.get(name)
        fix = f"It belongs to {other.owner}." if other else ""
        return unknown_name_error(kind, owner, name, [option.name for option in self.options_of(owner)], fix)

    def signature(self, owner: str) -> inspect.Signature:
        """Returns the constructor signature of an owner, `self` included."""
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter("self", kind)]
        parameters += [inspect.Parameter(o.name, kind, default=o.default) for o in self.options_of(owner)]
        return inspect.Signature(parameters)

    def bind(self, owner: str, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Binds the arguments of a constructor call; returns values by name, with defaults filled in.

        Raises:
          TypeError: a keyword is unknown, a required value is missing, or there are too many positional values.
        """
        names = [option.name for option in self.options_of(owner)]
        for name in [name for name in kwargs if name not in names]:
            if name not in self or self[name].former_owner != owner:
                raise self.unknown_option_error(TypeError, owner, name)
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
