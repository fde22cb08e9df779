"""Objectives, predictors, routers, solvers, … by name; built-in strategies are registered in the same way as plug-ins
(docs/write-your-own.md)."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from packer.errors import (
    IncompatibleError,
    MissingDependencyError,
    PackerError,
    PluginError,
    UnknownNameError,
    ValidationError,
    raised,
    shown,
)

_KINDS = ("cache", "engine", "objective", "placement", "predictor", "router", "solver", "system")
GROUPS = {**{kind: f"packer.{kind}s" for kind in _KINDS}, "tuning policy": "packer.tuning"}

CONTRACTS = {
    "cache": "packer.twin.cluster.caching:CachePolicy",
    "engine": "packer.strategies:Engine",
    "objective": "packer.objectives.base:Objective",
    "placement": "packer.strategies:Placement",
    "predictor": "packer.strategies:Predictor",
    "solver": "packer.solvers.base:Solver",
    "tuning policy": "packer.twin.tuning.policy:TuningPolicy",
    "router": "packer.twin.cluster.routers.base:Router",
}
"""The class, or protocol, of the strategies of each kind; a solver has all that a router must have."""

_loaded: set[EntryPoint] = set()


@cache
def _entries(kind: str) -> dict[str, EntryPoint]:
    if kind not in GROUPS:
        raise UnknownNameError("kind of strategy", kind, GROUPS)
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=GROUPS[kind]):
        other = found.get(entry.name)
        if other is not None and other.value != entry.value:
            rule = f"Two installed packages register the {kind} {entry.name!r}: {other.value} and {entry.value}."
            raise IncompatibleError(f"{rule} Uninstall one of them.")
        found[entry.name] = entry
    return found


def names(kind: str) -> tuple[str, ...]:
    """Names of every registered strategy of a kind (a key of `GROUPS`), sorted."""
    return tuple(sorted(_entries(kind)))


def load(kind: str, name: str) -> Any:
    """Class (or factory) registered under a name. Raises `UnknownNameError`: nothing of that kind has that name;
    `MissingDependencyError`: its module imports a package that is not installed; `PluginError`: its module does not
    exist, lacks the class, or fails when imported."""
    entries = _entries(kind)
    if name not in entries:
        raise UnknownNameError(kind, name, entries)
    entry = entries[name]
    try:
        found = entry.load()
    except (Exception, SystemExit) as error:
        what = f"The {kind} {name!r} ({entry.value}) can't be loaded: it {raised(error)}."
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent is not None and _package(absent) != _package(entry.module):
            raise MissingDependencyError(f"{what} Install {_package(absent)!r}.") from error
        raise PluginError(what) from error
    _loaded.add(entry)
    return found


def plugins_in_use() -> list[tuple[str, EntryPoint]]:
    """Plug-ins loaded by name, as (kind, entry point); if there are none, all whose modules were imported."""
    imported = _imported()
    return [each for each in imported if each[1] in _loaded] or imported


def _imported() -> list[tuple[str, EntryPoint]]:
    every = ((kind, entry) for kind in GROUPS for entry in _entries(kind).values())
    return [each for each in every if each[1].module in sys.modules and _package(each[1].module) != "packer"]


def plugin_behind(error: BaseException) -> str | None:
    """The strategy of another package whose code raised an error, as `named`; None if no plug-in is involved.
    A strategy that is given as an object is found by its methods. If code of a package that registers strategies
    belongs to no class of one, the text names all strategies in use of that package."""
    imported, found, where, given = _imported(), None, error.__traceback__, None
    while where is not None:
        name, code = str(where.tb_frame.f_globals.get("__name__", "")), where.tb_frame.f_code
        mine = [each for each in imported if _package(each[1].module) == _package(name)]
        exact = [e for e in mine if (e[1].module, e[1].attr) == (name, code.co_qualname.partition(".")[0])]
        if exact or (mine and not found):
            found = exact or [each for each in mine if each[1] in _loaded] or mine
        if given is None and _package(name) != "packer":
            given = _object_in_words(where.tb_frame.f_locals.get("self"))
        where = where.tb_next
    return named(found) if found else given


def _object_in_words(item: object) -> str | None:
    """A strategy of another package that was given as an object; None for another object."""
    if _package(type(item).__module__) == "packer":
        return None
    for kind, contract in CONTRACTS.items():
        module, name = contract.split(":")
        if module in sys.modules and isinstance(item, getattr(sys.modules[module], name)):
            made = type(item)
            return f"The {kind} {getattr(item, 'name', '')!r} ({made.__module__}:{made.__qualname__})"
    return None


def blame(error: BaseException, given: Iterable[object] = ()) -> None:
    """Raise a `PluginError` if the code of a plug-in raised this error, or one of the objects `given` is a plug-in."""
    if plugin := plugin_behind(error):
        raise PluginError(f"{plugin} {raised(error)}.") from error
    if plugin := next(filter(None, map(_object_in_words, given)), None):
        rule = f"{plugin} may break its contract, which packer.testing checks"
        raise PluginError(f"{rule}: {type(error).__name__}: {error}.") from error


@contextmanager
def blaming_plugins() -> Iterator[None]:
    """Turn an error that the code of a plug-in raises in the block into a `PluginError` that names the plug-in.
    packer's own errors, and those of other code, pass unchanged."""
    try:
        yield
    except PackerError:
        raise
    except (Exception, SystemExit) as error:
        blame(error)
        raise


def named(plugins: Sequence[tuple[str, EntryPoint]]) -> str:
    """Strategies of other packages in words, with which a sentence begins."""
    return "The " + " or the ".join(f"{kind} {entry.name!r} ({entry.value})" for kind, entry in plugins)


def _package(module: str) -> str:
    return module.partition(".")[0]


def make(kind: str, spec: str, classes: Mapping[str, Any] | None = None) -> Any:
    """The strategy that a text names: "gpus", or with parameters "lightllm:max_wait_tokens=1".

    Parameters are the fields of its dataclass. `classes`: classes by name to use instead of the registered ones.

    Raises `UnknownNameError`: nothing of that kind has that name; `ValidationError`: the strategy has no such
    parameter, or a value breaks a rule; `PluginError`: the strategy is a plug-in that raised another error.
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
        if key in given:
            raise ValidationError(f"Expected each parameter once, got {key} twice in {shown(spec)}.")
        given[key] = _value(value)
    with blaming_plugins():
        return made(**given)


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
