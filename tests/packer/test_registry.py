"""Strategies by name."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from packer import Adapter, Workload, load_profile, registry, solve
from packer.errors import IncompatibleError, MissingDependencyError, PluginError, UnknownNameError, ValidationError
from packer.objectives.gpus import Gpus
from packer.testing.analytic import AnalyticPredictor


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


@pytest.mark.parametrize(("kind", "name"), [("objective", "gpus"), ("predictor", "twin"), ("solver", "greedy")])
def test_built_ins_come_by_the_same_door(kind: str, name: str) -> None:
    """Built-in strategies are entry points like a plug-in's, and load."""
    assert name in registry.names(kind)
    assert registry.load(kind, name) is not None


def test_unknown_names_list_the_known(entries) -> None:
    """A wrong name is answered with the known ones."""
    entries(("greedy", "packer.errors:PackerError"))
    with pytest.raises(UnknownNameError, match="Did you mean 'greedy'"):
        registry.load("solver", "greedi")


def test_a_parameter_is_given_once() -> None:
    """A parameter that is given twice is an error, as the second value would replace the first."""
    assert registry.make("engine", "lightllm:max_wait_tokens=1").max_wait_tokens == 1
    with pytest.raises(ValidationError, match=r"once, got max_wait_tokens twice in 'lightllm:"):
        registry.make("engine", "lightllm:max_wait_tokens=1,max_wait_tokens=2")


def test_one_name_for_two_things_is_an_error(entries) -> None:
    """Two packages that register one name with different classes can't be distinguished: an error."""
    entries(("greedy", "packer.errors:PackerError"), ("greedy", "packer.errors:InputError"))
    with pytest.raises(IncompatibleError, match="greedy"):
        registry.names("solver")
    entries(("greedy", "packer.errors:PackerError"), ("greedy", "packer.errors:PackerError"))
    assert registry.names("solver") == ("greedy",)


PLUG_INS = {
    "absent_import": "import no_such_package_at_all.part",
    "bug": "1 / 0",
    "bad_import": "from packer.errors import NoSuchClass",
    "own_part": "import own_part.missing",
}


@pytest.mark.parametrize(
    ("value", "kind", "says"),
    [
        ("absent_import:X", MissingDependencyError, "Install 'no_such_package_at_all'"),
        ("bug:X", PluginError, "ZeroDivisionError"),
        ("bad_import:X", PluginError, "NoSuchClass"),
        ("own_part:X", PluginError, "own_part.missing"),
        ("no_such_module_at_all:X", PluginError, "no_such_module_at_all"),
        ("packer.errors:NoSuchClass", PluginError, "NoSuchClass"),
    ],
)
def test_a_plug_in_that_fails_to_load_is_named_with_its_fault(
    entries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, kind: type[Exception], says: str
) -> None:
    """Only a package that is not installed is a missing dependency; a bug is said to be one, with its cause."""
    for name, text in PLUG_INS.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    entries(("broken", value))
    with pytest.raises(kind, match=f"'broken'.*{says}") as caught:
        registry.load("solver", "broken")
    assert caught.value.__cause__ is not None


FAULTY = """
class X:
    def __init__(self):
        raise KeyError("boom")
"""


def test_an_error_of_a_plug_in_s_own_code_names_it(entries, tmp_path: Path, monkeypatch) -> None:
    """What a plug-in raises when it is made is reported with its name; an error of other code is not."""
    (tmp_path / "faulty.py").write_text(FAULTY)
    monkeypatch.syspath_prepend(tmp_path)
    entries(("broken", "faulty:X"))
    with pytest.raises(PluginError, match=r"the solver 'broken' \(faulty:X\) .*raised KeyError: 'boom'") as caught:
        registry.make("solver", "broken")
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(KeyError), registry.blaming_plugins():
        raise KeyError("ours")


def test_only_a_strategy_that_was_loaded_may_break_its_contract(entries, tmp_path: Path, monkeypatch) -> None:
    """What a strategy returns is not blamed on others in its module."""
    (tmp_path / "pair.py").write_text("class One: ...\nclass Other: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    entries(("one", "pair:One"), ("other", "pair:Other"))
    registry.load("solver", "one")
    assert {entry.name for _, entry in registry.plugins_in_use()} == {"one"}


RAISES = """
class X:
    name = "broken"

    def supports(self, problem):
        return None

    def solve(self, problem):
        raise RuntimeError("bad day")
"""


def test_an_error_of_a_solver_of_a_plug_in_names_it(entries, tmp_path: Path, monkeypatch) -> None:
    """`packer.solve` reports what the solver of another package raises with its name, as the command does."""
    (tmp_path / "raises.py").write_text(RAISES)
    monkeypatch.syspath_prepend(tmp_path)
    entries(("broken", "raises:X"))
    fleet, server = Workload([Adapter("a", 8, 0.1)]), load_profile("h100-64gb/llama-3.1-8b-instruct")
    with pytest.raises(PluginError, match=r"'broken' \(raises:X\) raised RuntimeError: bad day"):
        solve(fleet, server, Gpus(), solver="broken", predictor=AnalyticPredictor())
