"""Imports point one way: cli → (report, operate) → planning → solvers → (objectives, predictors) → twin → core."""

from __future__ import annotations

import ast
from functools import cache
from typing import Any

CORE = {
    "adapter", "arrays", "arrival", "bin", "blocks", "change", "checks", "cluster", "engine_spec", "engines",
    "errors", "evaluation", "failover", "fingerprint", "gamma", "goal", "gpu", "job", "kv_shape", "lengths", "memo",
    "moves", "placement", "plan", "profile", "progress", "public", "registry", "room", "search", "seeds", "sessions",
    "settings", "speculation", "strategies", "terms", "times", "version", "words", "workload",
}  # fmt: skip
EDGES = {"io", "traces", "export"}
LEVEL = {
    "core": 0,
    "edge": 1,
    "twin": 2,
    "objectives": 3,
    "fit": 3,
    "predictors": 3,
    "live": 4,
    "solvers": 4,
    "planning": 5,
    "papers": 5,
    "testing": 6,
    "operate": 6,
    "report": 6,
    "cli": 7,
}
MEMORY = "packer.twin.memory"
"""Arithmetic on profiles, which imports the core only: readers of plans use it as well."""
FACADE = "packer"
"""`packer/__init__.py` names the whole public API; it imports lazily."""


def _layer(name: str) -> str:
    """Layer of a module of packer, by the second part of its name."""
    part = name.split(".")[1] if "." in name else name
    if name.startswith(MEMORY):
        return "core"
    if part in EDGES:
        return "edge"
    return part if part in LEVEL else "core"


@cache
def _imports(module: Any) -> list[tuple[str, bool]]:
    """Modules of packer that one imports, each with whether the import stands inside a function."""
    found, left = [], [(module.tree, False)]
    while left:
        node, inside = left.pop()
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "packer":
            names = [f"packer.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        found += [(name, inside) for name in names if name.split(".")[0] == "packer"]
        within = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        left += [(child, within) for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr)]
    return found


def _allowed(importer: str, imported: str, lazily: bool) -> bool:
    """Whether the importing module's layer may know the imported one's."""
    here, there = _layer(importer), _layer(imported)
    if here == "core" and there == "edge":
        return lazily  # Plan.save writes itself
    if LEVEL[here] == LEVEL[there]:
        return here == there
    return LEVEL[there] < LEVEL[here]


def test_imports_point_one_way(modules: list[Any]) -> None:
    """No module imports one that stands above it, nor an objective a predictor or the other way round."""
    wrong = [
        f"{module.name} imports {name}"
        for module in modules
        if module.name != FACADE
        for name, lazily in _imports(module)
        if name != FACADE and not _allowed(module.name, name, lazily)
    ]
    assert wrong == []


def test_no_circles_between_files(modules: list[Any]) -> None:
    """Modules can be put in an order in which each imports earlier ones alone; imports in functions don't count."""
    names = {module.name for module in modules}
    left = {
        module.name: {
            target
            for node in module.tree.body
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
            for target in (f"{node.module}.{alias.name}", node.module)
            if target in names - {module.name, FACADE}
        }
        for module in modules
    }
    while free := [name for name, imported in left.items() if not imported & left.keys()]:
        for name in free:
            del left[name]
    assert sorted(left) == []


def test_library_does_not_use_its_own_facade(modules: list[Any]) -> None:
    """A module that says `import packer` would hide what it depends on from the rule above; commands may depend on all
    folders, and call what users call."""
    assert [
        m.name
        for m in modules
        if m.name != FACADE and not m.name.startswith("packer.cli.") and any(name == FACADE for name, _ in _imports(m))
    ] == []


def test_core_is_what_this_test_says(modules: list[Any]) -> None:
    """A new module in packer/ is a decision: it becomes core, or it goes to the folder where it belongs."""
    top = {m.name.split(".")[1] for m in modules if m.name.count(".") == 1 and not m.is_package}
    assert top == CORE
