"""Objectives, predictors, routers, solvers, tuning policies by name; built-ins are registered as plug-ins are.

A third-party package registers a class in its own pyproject.toml, as this one does:

    [project.entry-points."packer.solvers"]
    mine = "my_package.mine:MySolver"
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from packer.errors import (
    IncompatibleError,
    MissingDependencyError,
    PluginError,
    UnknownNameError,
    ValidationError,
    raised,
    shown,
)

GROUPS = {
    "cache": "packer.caches",
    "engine": "packer.engines",
    "objective": "packer.objectives",
    "placement": "packer.placements",
    "predictor": "packer.predictors",
    "router": "packer.routers",
    "solver": "packer.solvers",
    "system": "packer.systems",
    "tuning policy": "packer.tuning",
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

    Raises `UnknownNameError`: nothing of that kind has that name; `MissingDependencyError`: its module imports a
    package that is not installed; `PluginError`: its module is not there, does not have the class, or fails while it is
    imported.
    """
    entries = _entries(kind)
    if name not in entries:
        raise UnknownNameError(kind, name, entries)
    entry = entries[name]
    try:
        return entry.load()
    except (Exception, SystemExit) as error:
        what = f"The {kind} {name!r} ({entry.value}) can't be loaded: it {raised(error)}."
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent is not None and absent.partition(".")[0] != entry.module.partition(".")[0]:
            raise MissingDependencyError(f"{what} Install {absent.partition('.')[0]!r}.") from error
        raise PluginError(what) from error


def plugin_behind(error: BaseException) -> str | None:
    """The strategy of another package in whose code an error was raised, as text; None where there is none."""
    packages = {
        entry.module.partition(".")[0]: f"the {kind} {entry.name!r} ({entry.value})"
        for kind in GROUPS
        for entry in _entries(kind).values()
    }
    packages.pop("packer", None)
    found, where = None, error.__traceback__
    while where is not None:
        package = str(where.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
        found, where = packages.get(package, found), where.tb_next
    return found


def make(kind: str, spec: str, classes: Mapping[str, Any] | None = None) -> Any:
    """The strategy that a text names: "gpus", or with parameters "slo:mean_ttft_ms=500,p99_itl_ms=60".

    Parameters are the fields of its dataclass. `classes`: by name, in place of what is registered for the kind.

    Raises `UnknownNameError`: nothing of that kind has that name; `ValidationError`: it has no such parameter, or the
    value breaks a rule.
    """
    name, colon, text = spec.partition(":")
    if classes is not None and name not in classes:
        raise UnknownNameError(kind, name, classes)
    made = load(kind, name) if classes is None else classes[name]
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
