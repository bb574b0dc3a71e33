"""Defines `TrainingOptions`: the checked, immutable values of all options of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from npu_bridge.base.errors import did_you_mean


class TrainingOptions(Mapping):
    """All options of one run, checked and in plain form: `options.precision_mode`, `options["dump_step"]`.

    `read_run_config` and `read_session_config` return such objects; both give equal values for equal settings. Fields
    have the names of `NPURunConfig` and the helper classes (`enable_dump`, `accelerate_train_mode`, ...). Texts are
    `str`. An option that is not set has the NPU stack's default, which is often None.
    """

    __slots__ = ("_set_names", "_values")
    _set_names: tuple[str, ...]

    def __init__(self, values: Mapping[str, Any], were_set: Iterable[str] = ()):
        """Copies `values`, a dict by option name; `were_set` names the options that differ from their default."""
        object.__setattr__(self, "_values", MappingProxyType(dict(values)))
        object.__setattr__(self, "_set_names", tuple(were_set))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self._values[name]
        except KeyError:
            fix = did_you_mean(name, self._values, "")
            raise AttributeError(f"TrainingOptions: no option {name!r}. {fix}".rstrip()) from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"TrainingOptions: {name} cannot be set. Use replace({name}=...) for a changed copy.")

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(tuple(sorted(self._values.items(), key=lambda item: item[0])))

    def __repr__(self) -> str:
        return f"TrainingOptions({', '.join(f'{name}={value!r}' for name, value in self._values.items())})"

    def __reduce__(self):
        return TrainingOptions, (dict(self._values), self._set_names)

    def replace(self, **values: Any) -> TrainingOptions:
        """Returns a copy with some values changed, for tests and for code that changes a setting during a run.

        Raises:
          AttributeError: a name is not an option.
        """
        for name in values:
            getattr(self, name)
        return TrainingOptions({**self._values, **values}, self._set_names)
