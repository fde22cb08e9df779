"""Strategies by name."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from packer import registry
from packer.errors import IncompatibleError, MissingDependencyError, UnknownNameError


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch):
    """Replaces what is installed by a list of (name, value)."""

    def install(*pairs: tuple[str, str]) -> None:
        found = [EntryPoint(name, value, "packer.solvers") for name, value in pairs]
        monkeypatch.setattr(registry, "entry_points", lambda group: found)
        registry._entries.cache_clear()

    yield install
    monkeypatch.undo()
    registry._entries.cache_clear()


@pytest.mark.parametrize(
    ("kind", "name"), [("objective", "gpus"), ("predictor", "twin"), ("solver", "greedy")]
)
def test_built_ins_come_by_the_same_door(kind: str, name: str) -> None:
    """Built-in strategies are entry points like a plug-in's, and load."""
    assert name in registry.names(kind)
    assert registry.load(kind, name) is not None


def test_unknown_names_list_the_known(entries) -> None:
    """A wrong name is answered with the known ones."""
    entries(("greedy", "packer.errors:PackerError"))
    with pytest.raises(UnknownNameError, match="Did you mean 'greedy'"):
        registry.load("solver", "greedi")


def test_one_name_for_two_things_is_an_error(entries) -> None:
    """Two packages that register one name with different classes can't be told apart: say so."""
    entries(("greedy", "packer.errors:PackerError"), ("greedy", "packer.errors:InputError"))
    with pytest.raises(IncompatibleError, match="greedy"):
        registry.names("solver")
    entries(("greedy", "packer.errors:PackerError"), ("greedy", "packer.errors:PackerError"))
    assert registry.names("solver") == ("greedy",)


@pytest.mark.parametrize("value", ["no_such_module_at_all:X", "packer.errors:NoSuchClass"])
def test_a_broken_plug_in_is_named(entries, value: str) -> None:
    """A plug-in that can't be imported is our error with its name, not a traceback."""
    entries(("broken", value))
    with pytest.raises(MissingDependencyError, match="broken"):
        registry.load("solver", "broken")
