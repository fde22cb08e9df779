"""House rules that no linter has."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

MAX_LINES = 400
MAX_FUNCTION_LINES = 100


@pytest.mark.parametrize("folder", [".", "tests", "examples", "benchmarks"])
def test_files_stay_short(folder: str, root: Path, modules: list[Any]) -> None:
    """A file beyond 400 lines does more than one thing: split it."""
    paths = [m.path for m in modules] if folder == "." else list((root / folder).rglob("*.py"))
    lengths = {str(path): len(path.read_text("utf-8").splitlines()) for path in paths}
    assert {path: n for path, n in lengths.items() if n > MAX_LINES} == {}


def test_functions_stay_short(modules: list[Any]) -> None:
    """A function is read in one sitting: at most 100 lines with its docstring."""
    lengths = {
        f"{module.name}.{node.name}": node.end_lineno - node.lineno + 1
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
    }
    assert {name: n for name, n in lengths.items() if n > MAX_FUNCTION_LINES} == {}


def test_policies_are_objects(modules: list[Any]) -> None:
    """No module compares the name of a memory policy: what differs between them is an attribute of the policy."""
    names = {"reserved", "unified"}
    wrong = [
        f"{module.name}:{node.lineno}"
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Compare)
        and any(isinstance(c, ast.Constant) and c.value in names for c in ast.walk(node))
    ]
    assert wrong == []


def test_every_test_says_its_rule(root: Path) -> None:
    """A test opens with one sentence that says the rule it protects."""
    silent = []
    for path in sorted((root / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            is_test = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
            if is_test and not ast.get_docstring(node):
                silent.append(f"{path.relative_to(root)}::{node.name}")
    assert silent == []


def test_every_module_postpones_annotations(modules: list[Any]) -> None:
    """Annotations are never evaluated at import, which keeps start-up short and cycles harmless."""
    bare = []
    for module in modules:
        body = [node for node in module.tree.body if not isinstance(node, ast.Expr)]
        first = body[0] if body else None
        ok = first is None or (isinstance(first, ast.ImportFrom) and first.module == "__future__")
        bare += [] if ok else [module.name]
    assert bare == []


def _jit_decorators(module: Any) -> list[ast.expr]:
    """The Numba decorators of a module's functions."""
    found = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                call = decorator.func if isinstance(decorator, ast.Call) else decorator
                name = call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "")
                if name in {"njit", "jit", "vectorize", "guvectorize"}:
                    found.append(decorator)
    return found


def test_kernels_take_their_flags_from_one_place(modules: list[Any]) -> None:
    """No kernel hard-codes cache, fastmath, nogil or the like: all unpack the one table of flags."""
    wrong = []
    for module in modules:
        for decorator in _jit_decorators(module):
            keywords = decorator.keywords if isinstance(decorator, ast.Call) else []
            shared = any(k.arg is None for k in keywords)
            own = {k.arg for k in keywords} - {None, "inline", "forceinline"}
            if not shared or own:
                wrong.append(f"{module.name}:{decorator.lineno}")
    assert wrong == []


def test_there_is_one_table_of_kernel_flags(modules: list[Any]) -> None:
    """The flags of all kernels are set in one place, so that one line changes them all."""
    tables = []
    for module in modules:
        for node in module.tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict | ast.Call):
                keys = {getattr(k, "value", None) for k in getattr(node.value, "keys", [])}
                keys |= {k.arg for k in getattr(node.value, "keywords", [])}
                if keys & {"fastmath", "nogil"} and module.name.startswith(("packer.twin", "packer.predictors")):
                    tables.append(module.name)
    assert len(tables) == 1, tables
