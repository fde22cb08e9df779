"""Mutants are small faults that are drawn from a seed, and each can be put into its file."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def mutation(root: Path) -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("mutation_run", root / "benchmarks/mutation/run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_each_mutant_changes_its_line_alone(mutation: ModuleType, root: Path) -> None:
    """The file is still Python, and the same seed gives the same mutants."""
    drawn = list(mutation.drawn(20, 3, ("objectives", "report"), []))
    assert drawn == list(mutation.drawn(20, 3, ("objectives", "report"), []))
    more = mutation.drawn(5, 3, ("objectives", "report"), drawn)
    assert not {(each.path, each.before, each.after) for each in more} & {
        (each.path, each.before, each.after) for each in drawn
    }
    assert len({(each.path, each.line) for each in drawn}) == 20
    for each in drawn:
        before = (root / each.path).read_text("utf-8")
        after = mutation.source_with(each, before)
        assert ast.dump(ast.parse(before)) != ast.dump(ast.parse(after))
        rows = list(zip(before.splitlines(), after.splitlines(), strict=False))
        assert next(k for k, (a, b) in enumerate(rows, 1) if a != b) == each.line


def test_what_is_changed_and_what_is_left(mutation: ModuleType) -> None:
    """Annotations, messages and imports for types are no places of faults."""
    source = (
        "if TYPE_CHECKING and 1:\n    import x\n"
        "def f(a: int | None) -> int | None:\n"
        "    if a < 1 or a is None:\n        raise ValueError(f'{a + 1}' if a else 2)\n"
        "    return a * 2 if a else -a\n"
    )
    found = [ast.unparse(node) for node in mutation.places(ast.parse(source))]
    assert sorted(found) == sorted(
        ["a < 1 or a is None", "a < 1", "1", "a is None", "a * 2 if a else -a", "a * 2", "2"]
    )


def test_the_nearest_tests_run_first(mutation: ModuleType) -> None:
    """The file that mirrors the module, then what imports it, then what imports a module that does."""
    nearest = mutation.Nearest()
    found = nearest.of("operate/keeper.py")
    assert found[0] == "tests/operate/test_keeper.py"
    assert "tests/operate/test_follow.py" in found
    assert "tests/packer/test_lengths.py" not in found
    assert all(nearest.of(path) for path in ("twin/engine/admit.py", "packer/words.py", "solvers/support.py"))
