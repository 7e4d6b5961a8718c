"""Bind plain data to typed dataclasses and collect every mistake, not only the first."""

from __future__ import annotations

import dataclasses
import difflib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from kvferry.errors import KVFerryError, SettingsError

T = TypeVar("T")

MISSING_VALUE = "???"
"""What a YAML writes for a value that the user must give."""


@dataclass(frozen=True)
class Mistake:
    """One wrong setting: its dotted key (may be empty) and what is wrong with it."""

    key: str
    problem: str

    def at(self, inside: str, written: str) -> Mistake:
        """The same mistake, told of the keys that the user writes."""
        return Mistake(self.key.replace(inside, written), self.problem.replace(inside, written))

    def __str__(self) -> str:
        return f"{self.key}: {self.problem}" if self.key else self.problem


@dataclass(frozen=True)
class Range:
    """An inclusive bound for a number, written into a field's type with ``Annotated``."""

    low: float | None = None
    high: float | None = None

    def problem(self, value: float) -> str | None:
        """What is wrong with ``value``, or None."""
        if self.low is not None and value < self.low:
            return f"must be at least {self.low:g}, found {value:g}"
        if self.high is not None and value > self.high:
            return f"must be at most {self.high:g}, found {value:g}"
        return None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``" Did you mean `x`?"`` for the closest known name, else an empty string.

    A dotted path whose last part is exactly ``name`` wins over a similar spelling.
    """
    paths = sorted(known)
    exact = [path for path in paths if path.rpartition(".")[2] == name]
    close = exact or difflib.get_close_matches(name, paths, n=1, cutoff=0.55)
    if not close:
        leaves = {path.rpartition(".")[2]: path for path in paths}
        close = [leaves[n] for n in difflib.get_close_matches(name, leaves, n=1, cutoff=0.7)]
    return f" Did you mean `{close[0]}`?" if close else ""


def known_paths(cls: type) -> Iterator[str]:
    """Every dotted key that a dataclass and the dataclasses inside it accept."""
    hints = get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        yield field.name
        for option in (hints[field.name], *get_args(hints[field.name])):
            if isinstance(option, type) and dataclasses.is_dataclass(option):
                yield from (f"{field.name}.{path}" for path in known_paths(option))


def bind(
    cls: type[T],
    data: Mapping[str, Any],
    mistakes: list[Mistake],
    *,
    where: str = "",
    suggestions: Sequence[str] | None = None,
) -> T | None:
    """Build ``cls`` from ``data``; append to ``mistakes`` whatever does not fit and return None.

    Args:
        cls: a dataclass; its annotations say which types, choices and ranges are allowed.
        data: plain containers, as a YAML file gives them.
        mistakes: receives one entry for each unknown key, missing value or value of a wrong type.
        where: dotted prefix of the keys in messages.
        suggestions: dotted keys for "did you mean"; by default those of ``cls``.
    """
    suggestions = list(known_paths(cls)) if suggestions is None else suggestions
    hints = get_type_hints(cls, include_extras=True)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    before = len(mistakes)
    values: dict[str, Any] = {}
    for name, value in data.items():
        key = f"{where}.{name}" if where else str(name)
        if name not in fields or not fields[name].init:
            local = [f"{where}.{known}" if where else known for known in fields]
            hint = did_you_mean(key, local) or did_you_mean(str(name), suggestions)
            mistakes.append(Mistake(key, f"no such setting.{hint}"))
        else:
            values[name] = _convert(hints[name], value, key, mistakes, suggestions)
    for name, field in fields.items():
        required = (
            field.init
            and field.default is dataclasses.MISSING
            and field.default_factory is dataclasses.MISSING
        )
        if required and name not in data:
            mistakes.append(Mistake(f"{where}.{name}" if where else name, "is not set"))
    if len(mistakes) > before:
        return None
    try:
        return cls(**values)
    except SettingsError as error:
        mistakes.extend(_broken(rule, where, fields) for rule in error.rules)
        return None
    except KVFerryError as error:
        mistakes.append(Mistake(where, error.problem))
        return None


def _broken(rule: str, where: str, fields: Iterable[str]) -> Mistake:
    """A rule as a mistake of the one setting that it speaks of, or of the whole group."""
    name, _, rest = rule.partition(" ")
    if name not in fields or not rest.startswith("must "):
        return Mistake(where, rule)
    return Mistake(f"{where}.{name}" if where else name, rest)


def _convert(
    hint: Any, value: Any, key: str, mistakes: list[Mistake], suggestions: Sequence[str]
) -> Any:
    if value == MISSING_VALUE:
        mistakes.append(Mistake(key, f"needs a value: {key}=..."))
        return None
    origin = get_origin(hint)
    if origin is Annotated:
        base, *bounds = get_args(hint)
        before = len(mistakes)
        converted = _convert(base, value, key, mistakes, suggestions)
        if len(mistakes) == before and converted is not None:
            found = (bound.problem(converted) for bound in bounds if isinstance(bound, Range))
            mistakes.extend(Mistake(key, problem) for problem in found if problem)
        return converted
    if origin in (Union, types.UnionType):
        return _convert_union(hint, value, key, mistakes, suggestions)
    if origin is Literal:
        return _convert_literal(hint, value, key, mistakes)
    if origin in (tuple, list, Sequence):
        if not isinstance(value, (list, tuple)):
            mistakes.append(Mistake(key, f"must be a list like [a,b], found {value!r}"))
            return None
        item = get_args(hint)[0]
        items = [_convert(item, v, f"{key}[{i}]", mistakes, suggestions)
                 for i, v in enumerate(value)]  # fmt: skip
        return tuple(items) if origin is not list else items
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            mistakes.append(Mistake(key, f"must be a mapping, found {value!r}"))
            return None
        item = get_args(hint)[1]
        return {k: _convert(item, v, f"{key}.{k}", mistakes, suggestions)
                for k, v in value.items()}  # fmt: skip
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            mistakes.append(Mistake(key, f"must be a group of settings, found {value!r}"))
            return None
        return bind(hint, value, mistakes, where=key, suggestions=suggestions)
    if hint is Any:
        return value
    convert = _SCALARS.get(hint)
    if convert is None and isinstance(hint, type):
        if isinstance(value, hint):
            return value
        choose = f"{key.partition('.')[0]}@{key}=NAME"
        mistakes.append(Mistake(key, f"is chosen by name, with {choose}; found {value!r}"))
        return None
    if convert is None:
        raise TypeError(f"{key}: the schema uses a type that cannot be bound: {hint!r}")
    converted = convert(value)
    if converted is None:
        mistakes.append(Mistake(key, f"must be {_describe(hint)}, found {value!r}"))
    return converted


def _convert_union(
    hint: Any, value: Any, key: str, mistakes: list[Mistake], suggestions: Sequence[str]
) -> Any:
    options = get_args(hint)
    if value is None and type(None) in options:
        return None
    attempts: list[list[Mistake]] = []
    for option in (o for o in options if o is not type(None)):
        attempt: list[Mistake] = []
        converted = _convert(option, value, key, attempt, suggestions)
        if not attempt:
            return converted
        attempts.append(attempt)
    if len(attempts) == 1:
        mistakes.extend(attempts[0])
    else:
        ranges = [m for attempt in attempts for m in attempt if "at least" in m.problem
                  or "at most" in m.problem]  # fmt: skip
        wanted = f"must be {_describe(hint)}, found {value!r}"
        mistakes.append(ranges[0] if ranges else Mistake(key, wanted))
    return None


def _convert_literal(hint: Any, value: Any, key: str, mistakes: list[Mistake]) -> Any:
    choices = get_args(hint)
    if value in choices and not isinstance(value, bool):
        return value
    close = did_you_mean(str(value), [str(choice) for choice in choices])
    mistakes.append(Mistake(key, f"must be {_describe(hint)}, found {value!r}.{close}"))
    return None


def _describe(hint: Any) -> str:
    origin = get_origin(hint)
    if origin is Annotated:
        return _describe(get_args(hint)[0])
    if origin is Literal:
        return " or ".join(str(choice) for choice in get_args(hint))
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(option) for option in get_args(hint))
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return "null" if hint is type(None) else names.get(hint, str(hint))


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(value: Any) -> float | None:
    numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if numeric else None


def _text(value: Any) -> str | None:
    # A name or revision made of digits arrives from YAML as a number.
    plain = isinstance(value, (str, int, float)) and not isinstance(value, bool)
    return str(value) if plain else None


_SCALARS: dict[Any, Callable[[Any], Any]] = {
    int: _integer,
    float: _number,
    str: _text,
    bool: lambda value: value if isinstance(value, bool) else None,
}
