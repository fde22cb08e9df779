"""Objectives, predictors and solvers by name: built-ins and plug-ins come in by the same door.

A third-party package registers a class in its own pyproject.toml, as this one does:

    [project.entry-points."packer.solvers"]
    mine = "my_package.mine:MySolver"
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from packer.errors import IncompatibleError, MissingDependencyError, UnknownNameError

GROUPS = {"objective": "packer.objectives", "predictor": "packer.predictors", "solver": "packer.solvers"}


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
    """Names of every registered strategy of a kind ("objective", "predictor", "solver"), sorted."""
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
