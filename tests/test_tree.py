"""The drawing of the tree in CONTRIBUTING.md is the tree."""

from __future__ import annotations

import re
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
