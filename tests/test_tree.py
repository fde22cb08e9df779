"""The drawing of the tree in CONTRIBUTING.md is the tree."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

FENCE = re.compile(r"<!-- the tree -->\n```text\n(.*?)```", re.DOTALL)
ENTRY = re.compile(r"^(?P<indent> *)(?P<name>[\w./-]+)(?:  +(?P<text>.*))?$")


def drawn(root: Path) -> dict[str, str]:
    """Folder or file of the drawing → what it says of it."""
    found = FENCE.search((root / "CONTRIBUTING.md").read_text("utf-8"))
    assert found is not None
    paths: dict[str, str] = {}
    above: list[str] = []
    for line in found[1].splitlines():
        entry = ENTRY.match(line)
        assert entry is not None, line
        depth = len(entry["indent"]) // 2
        above[depth:] = [entry["name"].rstrip("/")]
        paths["/".join(above)] = entry["text"] or ""
    return paths


def test_every_drawn_path_exists_and_is_explained(root: Path) -> None:
    """A newcomer who follows the drawing finds a folder, and a word on each."""
    for path, text in drawn(root).items():
        assert (root / path).exists(), path
        assert text, path


def test_every_package_is_drawn(root: Path, folders: dict[str, str]) -> None:
    """A folder with code that the drawing lacks would not be found."""
    known = set(drawn(root))
    packages = {
        str(init.parent.relative_to(root))
        for folder in folders.values()
        for init in (root / folder).rglob("__init__.py")
        if not any(part.is_symlink() for part in (init.parent, *init.parent.parents))
    }
    assert packages - known == set()


@pytest.mark.parametrize("name", ["tests", "benchmarks", "examples", "docs"])
def test_other_folders_are_drawn(root: Path, name: str) -> None:
    """Folders without a package belong to the drawing, too."""
    assert name in drawn(root)


VARIANTS = {"packer.predictors.learned", "packer.papers.placements.maxbase", "packer.planning.placing"}
"""Modules whose strategies differ in one value of the same rule."""


def test_a_strategy_has_a_file_of_its_own(root: Path) -> None:
    """A newcomer who looks for a router, solver, cache or engine finds it by its name: one strategy, one file."""
    groups = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]["entry-points"]
    for strategies in groups.values():
        modules = Counter(target.partition(":")[0] for target in strategies.values() if ":" in target)
        assert {name for name, count in modules.items() if count > 1} <= VARIANTS
