"""Objectives, predictors, routers and solvers by name: built-ins and plug-ins come in by the same door.

A third-party package registers a class in its own pyproject.toml, as this one does:

    [project.entry-points."packer.solvers"]
    mine = "my_package.mine:MySolver"
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from packer.errors import (
    IncompatibleError,
    MissingDependencyError,
    UnknownNameError,
    ValidationError,
    shown,
)

GROUPS = {
    "objective": "packer.objectives",
    "predictor": "packer.predictors",
    "router": "packer.routers",
    "solver": "packer.solvers",
}


@cache
def _entries(kind: str) -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=GROUPS[kind]):
        other = found.get(entry.name)
        if other is not None and other.value != entry.value:
            raise IncompatibleError(
                f"Two installed packages register the {kind} {entry.name!r}: {other.value} and "
                f"{entry.value}. Uninstall one of them."
            )
        found[entry.name] = entry
    return found


def names(kind: str) -> tuple[str, ...]:
    """Names of every registered strategy of a kind (a key of `GROUPS`), sorted."""
    return tuple(sorted(_entries(kind)))


def load(kind: str, name: str) -> Any:
    """Class (or factory) registered under a name.

    Raises
    ------
    UnknownNameError
        Nothing of that kind has that name.
    MissingDependencyError
        Its module can't be imported because a package is absent.
    """
    entries = _entries(kind)
    if name not in entries:
        raise UnknownNameError(kind, name, entries)
    try:
        return entries[name].load()
    except (ImportError, AttributeError) as error:
        raise MissingDependencyError(
            f"The {kind} {name!r} ({entries[name].value}) can't be loaded: {error}."
        ) from error


def make(kind: str, spec: str) -> Any:
    """The strategy that a text names: "gpus", or with parameters "slo:mean_ttft_ms=500,p99_itl_ms=60".

    Parameters are the fields of its dataclass.

    Raises
    ------
    UnknownNameError
        Nothing of that kind has that name.
    ValidationError
        It has no such parameter, or the value breaks a rule.
    """
    name, colon, text = spec.partition(":")
    made = load(kind, name)
    known = {item.name for item in fields(made) if item.init} if is_dataclass(made) else set()
    given: dict[str, Any] = {}
    for part in text.split(",") if colon else ():
        key, equals, value = part.partition("=")
        if not equals:
            raise ValidationError(f"Expected parameters as {name}:key=value,…, got {shown(part)}.")
        if key not in known:
            listed = ", ".join(sorted(known)) or "none"
            raise ValidationError(f"The {kind} {name!r} has no parameter {shown(key)}; it has: {listed}.")
        given[key] = _value(value)
    return made(**given)


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
