"""How many random faults in the code the tests notice.

    python benchmarks/mutation/run.py --mutants 100 --seed 0 -o benchmarks/mutation/results.json

A mutant is one small change of one expression: a comparison, an operator, a constant, `and` for `or`, a condition
that is turned round. All are drawn from the seed, each place with the same probability. The tests that mirror the
changed file run first, then those of its folder, then the whole suite (`--whole`): the first failure kills the
mutant. The work is done in a copy of the checkout; kernels that a mutant changes are compiled anew.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("twin", "solvers", "planning", "operate", "packer")
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult,
}  # fmt: skip


@dataclass
class Mutant:
    """A change of one line, and what the tests said: "killed by …", or "lives"."""

    path: str
    line: int
    before: str
    after: str
    outcome: str = ""


def places(tree: ast.Module) -> list[ast.AST]:
    """Nodes that `changed` changes, outside of annotations and messages of errors."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        if isinstance(node, (ast.AnnAssign, ast.arg)):
            parts = [node.annotation]
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            parts = [node.returns]
        elif isinstance(node, (ast.Raise, ast.JoinedStr)) or (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        ):
            parts = [node]
        skipped |= {id(inner) for part in parts if part is not None for inner in ast.walk(part)}
    return [node for node in ast.walk(tree) if id(node) not in skipped and changed(node) is not None]


def changed(node: ast.AST) -> ast.AST | None:
    """The node with a fault; None for one that is left alone."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        return ast.Compare(node.left, [COMPARISONS[type(node.ops[0])](), *node.ops[1:]], node.comparators)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS and not _text(node):
        return ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
    if isinstance(node, ast.BoolOp):
        return ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    if isinstance(node, ast.IfExp):
        return ast.IfExp(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return ast.Constant(node.value + 1)
    return None


def _text(node: ast.BinOp) -> bool:
    """Whether an operator joins texts or types."""
    return any(
        isinstance(side, ast.JoinedStr)
        or (isinstance(side, ast.Constant) and isinstance(side.value, (str, type(None))))
        for side in (node.left, node.right)
    )


def source_of(folder: str) -> list[Path]:
    """The modules of a folder; links in packer/ lead to others."""
    inside = [path for path in sorted((ROOT / folder).rglob("*.py")) if not path.is_symlink()]
    return [p for p in inside if not any((ROOT / q).is_symlink() for q in p.relative_to(ROOT).parents)]


def mutants(count: int, seed: int, folders: tuple[str, ...]) -> Iterator[Mutant]:
    """So many mutants, no two of one line."""
    found: list[tuple[Path, int]] = []
    trees = {path: ast.parse(path.read_text("utf-8")) for folder in folders for path in source_of(folder)}
    for path, tree in trees.items():
        found += [(path, k) for k in range(len(places(tree)))]
    lines: set[tuple[Path, int]] = set()
    rng = random.Random(seed)
    rng.shuffle(found)
    for path, k in found:
        node = places(trees[path])[k]
        other = changed(node)
        assert isinstance(node, ast.expr)
        assert other is not None
        if (path, node.lineno) in lines:
            continue
        lines.add((path, node.lineno))
        name = str(path.relative_to(ROOT))
        yield Mutant(name, node.lineno, ast.unparse(node), ast.unparse(ast.fix_missing_locations(other)))
        if len(lines) == count:
            return


def source_with(mutant: Mutant, source: str) -> str:
    """The source with the fault: the first such expression of the line."""
    for node in places(ast.parse(source)):
        assert isinstance(node, ast.expr)
        if node.lineno == mutant.line and ast.unparse(node) == mutant.before:
            rows = source.encode().splitlines(keepends=True)
            assert node.end_lineno is not None
            begin = sum(map(len, rows[: node.lineno - 1])) + node.col_offset
            end = sum(map(len, rows[: node.end_lineno - 1])) + (node.end_col_offset or 0)
            data = source.encode()
            return (data[:begin] + f"({mutant.after})".encode() + data[end:]).decode()
    raise ValueError(f"{mutant.path}:{mutant.line} has no {mutant.before!r}")


def tests_of(path: str, *, whole: bool) -> list[list[str]]:
    """Arguments of pytest, the nearest tests first."""
    module = Path(path)
    folder = module.parent.parts
    # Some folders of packer/ have their tests at the top: export, testing.
    folders = [Path("tests", *folder), Path("tests", *folder[1:]), Path("tests", folder[0])]
    folders = [each for each in folders if each != Path("tests")]
    own = [each / f"test_{module.stem}.py" for each in folders[:2]]
    steps = [str(each) for each in dict.fromkeys([*own, *folders]) if (ROOT / each).exists()]
    return [[step] for step in steps] + ([["tests"]] if whole else [])


def outcome(mutant: Mutant, copy: Path, limit_s: float, *, whole: bool) -> str:
    """What kills the mutant."""
    target = copy / mutant.path
    source = target.read_text("utf-8")
    target.write_text(source_with(mutant, source), "utf-8")
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        for step in tests_of(mutant.path, whole=whole):
            command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *step]
            try:
                done = subprocess.run(
                    command, cwd=copy, env=environment, capture_output=True, text=True, timeout=limit_s
                )
            except subprocess.TimeoutExpired:
                return f"killed by time in {step[0]}"
            if done.returncode not in (0, 5):
                failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
                return f"killed by {failed[0].split(' ')[1] if failed else step[0]}"
    finally:
        target.write_text(source, "utf-8")
    return "lives"


def main() -> None:
    """Draw, run, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mutants", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folders", default=",".join(FOLDERS))
    parser.add_argument(
        "--limit", type=float, default=900.0, help="seconds of a step; a mutant may loop for ever"
    )
    parser.add_argument("--whole", action="store_true", help="run the whole suite on those that live")
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    drawn = list(mutants(given.mutants, given.seed, tuple(given.folders.split(","))))
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", "live-results")
        shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
        for mutant in drawn:
            mutant.outcome = outcome(mutant, copy, given.limit, whole=given.whole)
            print(
                f"{mutant.path}:{mutant.line}: {mutant.before} → {mutant.after}: {mutant.outcome}", flush=True
            )
    killed = sum(mutant.outcome != "lives" for mutant in drawn)
    print(f"{killed} of {len(drawn)} killed")
    if given.output is not None:
        rows = {"seed": given.seed, "killed": killed, "mutants": [asdict(mutant) for mutant in drawn]}
        given.output.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
