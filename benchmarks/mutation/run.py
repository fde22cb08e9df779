"""How many random faults in the code the tests notice.

    python benchmarks/mutation/run.py --mutants 100 --seed 0 -o benchmarks/mutation/results.json
    python benchmarks/mutation/run.py --again -o benchmarks/mutation/results.json

A mutant is one small change of one expression: a comparison, an operator, a constant, `and` for `or`, a condition
that is turned round. All are drawn from the seed, each place with the same probability. The test file that mirrors the
changed module runs first, then those that name what it defines or reach it by few imports, then the rest of its
folder, until one fails (the mutant is killed) or the CPU time of a mutant is spent. The work is done in a copy of the
checkout; kernels that a mutant changes are compiled anew. Mutants that the output file holds are passed over.
`--again` runs those of the file that were not killed on the tree as it is now, and keeps what came of them first;
`--only` those at a place, `--tests` with tests of one's choice instead of the nearest. `same` in the file says why a
mutant is none: these stay in the count of those that live.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from packer.testing.records import record_text
from packer.twin.kernel_folder import named_folder

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("twin", "solvers", "planning", "operate", "packer")
TOGETHER = 4
"""Test files that one process runs: each start costs about 2 s of CPU time."""
ENDED = (signal.SIGXCPU, signal.SIGTERM, signal.SIGKILL, signal.SIGINT)
"""Ends of a process that say nothing of a mutant, as a crash does."""
DEPTH = 4
"""Imports from a test to the module that is changed, at most."""
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
    first: str = ""
    """What came of it before the tests were changed, for one that ran again."""
    row: str = ""
    """The line of the source, by which it is found where lines have moved."""
    same: str = ""
    """Why no test can tell it from the source, for one that changes nothing a user can see."""

    @property
    def killed(self) -> bool:
        """Whether a test failed."""
        return self.outcome.startswith("killed")


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


def drawn(count: int, seed: int, folders: tuple[str, ...], done: list[Mutant]) -> Iterator[Mutant]:
    """So many mutants, no two of one line, none that is done."""
    found: list[tuple[Path, int]] = []
    trees = {path: ast.parse(path.read_text("utf-8")) for folder in folders for path in source_of(folder)}
    for path, tree in trees.items():
        found += [(path, k) for k in range(len(places(tree)))]
    passed = {(each.path, each.before, each.after) for each in done}
    lines: set[tuple[Path, int]] = set()
    random.Random(seed).shuffle(found)
    for path, k in found:
        node = places(trees[path])[k]
        other = changed(node)
        assert isinstance(node, ast.expr)
        assert other is not None
        name = str(path.relative_to(ROOT))
        row = path.read_text("utf-8").splitlines()[node.lineno - 1].strip()
        other = ast.fix_missing_locations(other)
        mutant = Mutant(name, node.lineno, ast.unparse(node), ast.unparse(other), row=row)
        same = mutant.before == mutant.after  # 1e19 + 1 is the same number
        if same or (path, node.lineno) in lines or (name, mutant.before, mutant.after) in passed:
            continue
        lines.add((path, node.lineno))
        yield mutant
        if len(lines) == count:
            return


def source_with(mutant: Mutant, source: str) -> str:
    """The source with the fault, in the expression of this row that is nearest to the line."""
    text = source.splitlines()
    same = [node for node in places(ast.parse(source)) if ast.unparse(node) == mutant.before]
    if not same:
        raise ValueError(f"{mutant.path}:{mutant.line} has no {mutant.before!r}")
    node = min(same, key=lambda each: (text[each.lineno - 1].strip() != mutant.row, abs(each.lineno - mutant.line)))
    rows = source.encode().splitlines(keepends=True)
    begin = sum(map(len, rows[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, rows[: node.end_lineno - 1])) + node.end_col_offset
    data = source.encode()
    return (data[:begin] + f"({mutant.after})".encode() + data[end:]).decode()


def imported(path: Path) -> set[str]:
    """Names of packer's modules in the imports of a file: also packages and what is imported from modules."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("packer"):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("packer")}
    return found


def module_of(path: str) -> str:
    """Name under which a file is imported."""
    parts = Path(path).with_suffix("").parts
    return ".".join(parts if parts[0] == "packer" else ("packer", *parts))


def defined(path: Path) -> set[str]:
    """The name of a module and the names that it gives to functions, classes and constants."""
    found = {path.stem}
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {each.id for each in node.targets if isinstance(each, ast.Name)}
    return found


class Nearest:
    """Which test files have to do with a module."""

    def __init__(self) -> None:
        self.tests = {path: imported(path) for path in sorted((ROOT / "tests").rglob("test_*.py"))}
        self.words = {path: set(re.findall(r"\w+", path.read_text("utf-8"))) for path in self.tests}
        self.spread = Counter(word for words in self.words.values() for word in words)
        folders = {each.resolve() for each in (ROOT / "packer").iterdir() if each.is_dir()}
        paths = [*(ROOT / "packer").glob("*.py"), *(each for folder in folders for each in folder.rglob("*.py"))]
        files = [str(each.relative_to(ROOT)) for each in paths]
        self.modules = {module_of(name): imported(ROOT / name) for name in files}

    def of(self, path: str) -> list[str]:
        """The nearest first: the mirror, then by names of the module that few other tests have and by imports.

        Last come the others of its folder.
        """
        near, closeness = {module_of(path)}, dict.fromkeys(self.tests, 0.0)
        for k in range(DEPTH):
            for test, names in self.tests.items():
                if names & near:
                    closeness[test] = max(closeness[test], 0.5**k)
            near = {name for name, names in self.modules.items() if names & near}
        for word in defined(ROOT / path):
            for test, words in self.words.items():
                closeness[test] += word in words and 1.0 / self.spread[word]
        own = ROOT / "tests" / Path(path).parent
        for test in self.tests:
            closeness[test] += 0.3 * (test.parent == own)
        mirror, folder = own / f"test_{Path(path).stem}.py", Path(path).parts[0]
        chosen = [test for test, close in closeness.items() if close > 0.05 or folder in test.parts]
        chosen.sort(key=lambda t: (t != mirror, -closeness[t], len(self.tests[t]), t))
        return [str(each.relative_to(ROOT)) for each in chosen]


def outcome(mutant: Mutant, copy: Path, tests: list[str], limit_s: float) -> str:
    """What kills the mutant."""
    target = copy / mutant.path
    source = target.read_text("utf-8")
    target.write_text(source_with(mutant, source), "utf-8")
    own = {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "NUMBA_CACHE_DIR": str(copy / ".kernels")}
    environment = os.environ | own
    end = _used_s() + limit_s
    try:
        for k in (0, *range(1, len(tests), TOGETHER)):
            left = int(end - _used_s())
            if left < 3:
                return f"lives ({k} of {len(tests)} files in {limit_s:g} s)"
            step = tests[k : k + TOGETHER if k else 1]
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *step], cwd=copy,
                env=environment, capture_output=True, text=True, check=False,
                preexec_fn=lambda left=left: resource.setrlimit(resource.RLIMIT_CPU, (left, left + 5)),
            )  # fmt: skip
            if done.returncode in {-each for each in ENDED}:
                why = f"{limit_s:g} s of CPU time" if done.returncode == -signal.SIGXCPU else "interrupted"
                return f"undecided: {why} in {' '.join(step)}"
            if done.returncode not in (0, 5):
                failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
                return f"killed by {failed[0].split(' ')[1] if failed else step[0]}"
    finally:
        target.write_text(source, "utf-8")
    return f"lives ({len(tests)} files)"


def linked(source: str, target: str) -> None:
    """A second name of a file that is replaced, never changed; a copy on another file system."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _used_s() -> float:
    """CPU time of the tests so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Draw, run, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folders", default=",".join(FOLDERS))
    parser.add_argument("--limit", type=float, default=60.0, help="CPU time for a mutant, s")
    parser.add_argument("--again", action="store_true", help="those of the output file that were not killed")
    parser.add_argument("--only", default="", help="with --again: mutants of which path:line begins with this")
    parser.add_argument("--tests", default="", help="with --again: run these alone, file or file::test,…")
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    done, seed = list[Mutant](), given.seed
    if given.output is not None and given.output.exists():
        known = json.loads(given.output.read_text("utf-8"))
        done, seed = [Mutant(**each) for each in known["mutants"]], known["seed"] if given.again else seed
    if given.again:
        chosen = [each for each in done if not (each.killed or each.same)]
        chosen = [each for each in chosen if f"{each.path}:{each.line}:".startswith(given.only)]
    else:
        chosen = list(drawn(given.mutants, given.seed, tuple(given.folders.split(",")), done))
        done += chosen
    rows, nearest = [each for each in done if each.outcome], None if given.tests else Nearest()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", "live-results")
        shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
        if (kept := named_folder()).exists():
            shutil.copytree(kept, copy / ".kernels" / kept.name, copy_function=linked)
        for mutant in chosen:
            mutant.first = mutant.first or mutant.outcome
            named = nearest.of(mutant.path) if nearest is not None else given.tests.split(",")
            found = outcome(mutant, copy, named, given.limit)
            mutant.outcome = found if found.startswith("killed") or not given.tests else mutant.outcome
            print(f"{mutant.path}:{mutant.line}: {mutant.before} → {mutant.after}: {found}", flush=True)
            rows = [each for each in done if each.outcome]
            if given.output is not None:
                record = {"seed": seed, "killed": _killed(rows), "mutants": [asdict(each) for each in rows]}
                given.output.write_text(record_text(record) + "\n", "utf-8")
    print(f"{_killed(rows)} of {len(rows)} killed, {_used_s() / 60:.0f} minutes of CPU time")


def _killed(mutants: list[Mutant]) -> int:
    return sum(each.killed for each in mutants)


if __name__ == "__main__":
    main()
