"""Fixtures for everybody: where the tree stands and what its modules are."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {
    "packer": "packer",
    "packer.cli": "cli",
    "packer.objectives": "objectives",
    "packer.predictors": "predictors",
    "packer.solvers": "solvers",
    "packer.twin": "twin",
}
"""Import name → folder at the top of the tree."""


@dataclass(frozen=True)
class Module:
    """A source file as the import system knows it."""

    name: str
    path: Path
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        """Whether it is a folder's __init__.py."""
        return self.path.name == "__init__.py"


def _modules() -> list[Module]:
    found = []
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = list(path.relative_to(ROOT / folder).with_suffix("").parts)
            if package == "packer" and parts and (ROOT / "packer" / parts[0]).is_symlink():
                continue
            if parts[-1] == "__init__":
                parts.pop()
            found.append(Module(".".join([package, *parts]), path, ast.parse(path.read_text("utf-8"))))
    return found


@pytest.fixture(scope="session")
def root() -> Path:
    """The top of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def folders() -> dict[str, str]:
    """Import name of each folder at the top."""
    return FOLDERS


@pytest.fixture(scope="session")
def modules() -> list[Module]:
    """Every module of the package, parsed once."""
    return _modules()
