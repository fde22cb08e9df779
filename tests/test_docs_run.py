"""Every ```console block of the documents is typed as it stands, page by page, in an empty folder.

A page's blocks run in order and see each other's files; `examples/` is there as in a checkout. What a block can't
show here (a cluster, a GPU) is marked above it: `<!-- not run: the reason -->`; another exit code than 0 by
`<!-- exit 3 -->`. Lines that don't start with `$` are output: the words of each stand in what is printed, whatever its
figures are, and the number of GPUs of a decision is as shown.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from packer.cli import run
from packer.predictors import build
from packer.predictors.dataset import Spec

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(?:<!-- (not run|exit|file):? ?([^>]*?) -->\n)?```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"[-+−]?\d[\d,.]*")
DECISION = re.compile(r"\d+ × ")
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "docs").rglob("*.md")
    if "reference" not in path.parts and "```console" in path.read_text("utf-8")
)
"""Pages with commands; a page whose every block says why it is not run is read, and types nothing."""
WHOLE = re.compile(r"--gpus 1 |--max-loras 4$|--concurrency|solve many|azure-conv-2023|(double|cheapest|strict)\.json$")
"""Parts of commands whose words or GPUs only a whole hour gives; others simulate 600 s."""


def commands(body: str) -> list[tuple[str, list[str]]]:
    """The lines after `$`, with what a backslash continues, and the lines of output that are shown below each."""
    found: list[tuple[str, list[str]]] = []
    for line in body.replace("\\\n", " ").splitlines():
        if line.startswith("$ "):
            found.append((line[2:].strip(), []))
        elif found and line.strip() not in ("", "..."):
            found[-1][1].append(line)
    return found


def words(line: str) -> str:
    """A line of output without its figures, of which some change with every improvement."""
    return " ".join(NUMBER.sub("0", line).split())


def type_in(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and messages of one line: packer in this process, anything else in a shell."""
    words = shlex.split(line, comments=True)
    if words[0] != "packer" or set(words) & {"|", "&&", ";"}:
        done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=120, check=False)
        return done.returncode, done.stdout + done.stderr
    target = None
    if ">" in words:
        at = words.index(">")
        target, words = Path(words[at + 1]), words[:at]
    code = run(words[1:])
    out, err = capsys.readouterr()
    if target is not None:
        target.write_text(out, "utf-8")
    return code, out + err


@pytest.fixture
def _small_datasets(monkeypatch: pytest.MonkeyPatch, short_runs: Callable[[], AbstractContextManager[None]]) -> None:
    """Datasets are built in this process, of few and short simulations."""
    whole = build.build_dataset

    def quick(*arguments: Any, **options: Any) -> Spec:
        with short_runs():
            return whole(*arguments, **{**options, "rows": 64, "jobs": 1})

    monkeypatch.setattr(build, "build_dataset", quick)
    monkeypatch.setattr("packer.predictors.train.LEAST_ROWS", 64)


@pytest.mark.usefixtures("_small_datasets", "few_candidates")
@pytest.mark.parametrize("page", PAGES)
def test_page_runs(
    page: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    short_runs: Callable[[float], AbstractContextManager[None]],
) -> None:
    """A reader who types a page from top to bottom gets what it promises."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.delenv("COLUMNS", raising=False)  # pages show what a pipe gets, whatever the terminal of the tests
    typed = left = 0
    for mark, text, language, body in BLOCK.findall((ROOT / page).read_text("utf-8")):
        if mark == "file":
            (tmp_path / text.strip()).write_text(body, "utf-8")
        if language != "console":
            continue
        if mark == "not run":
            assert text.strip(), f"{page}: a block that is not run must say why"
            left += 1
            continue
        for line, shown in commands(body):
            wanted = int(text) if mark == "exit" else 0
            with short_runs(1.0 if WHOLE.search(line) else 1 / 6):
                code, messages = type_in(line, capsys)
            assert code == wanted, f"{page}: $ {line}\n{messages}"
            printed = {words(each) for each in messages.splitlines()}
            lost = [each for each in shown if words(each) not in printed]
            assert not lost, f"{page}: $ {line} does not print {lost}, but\n{messages}"
            gpus = [found.group() for each in shown[:1] if (found := DECISION.match(each))]
            assert messages.startswith(tuple(gpus) or ""), f"{page}: $ {line}: other GPUs\n{messages[:200]}"
            typed += 1
    assert typed + left > 0, f"{page}: no block runs"


def test_readme_shows_a_decision_of_the_tutorial() -> None:
    """The first screen shows what the command prints, as the tutorial does, whose commands are typed."""
    (shown,) = re.findall(r"^\d+ × .*$", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)
    assert f"\n{shown}\n" in (ROOT / "docs" / "tutorial.md").read_text("utf-8")


def test_every_command_is_typed() -> None:
    """A command of packer outside of ```console, without `$` or the reason why it is not run, would rot unseen."""
    for path in (ROOT / "docs").rglob("*.md"):
        for *_, language, body in BLOCK.findall(path.read_text("utf-8")) if "reference" not in path.parts else ():
            told = [line for line in body.splitlines() if re.match(r"packer [a-z]", line)]
            assert not told, f"{path.name}: ```{language}: {told[0]}"


def test_marks_are_understood() -> None:
    """A mark above a block that no test reads would silently run, or not run, the block."""
    for path in (ROOT / "docs").rglob("*.md"):
        for mark in re.findall(r"<!-- (not run.*?|exit.*?|file.*?) -->", path.read_text("utf-8")):
            assert re.fullmatch(r"not run: .+|exit \d+|file: [\w.-]+", mark), f"{path.name}: {mark}"


def test_reference_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference pages are what the code says today: python docs/generate_reference.py."""
    monkeypatch.setenv("PACKER_CONFIG", "")
    spec = importlib.util.spec_from_file_location("generate_reference", ROOT / "docs" / "generate_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    stale = [name for name, text in module.pages().items() if text != (module.FOLDER / name).read_text("utf-8")]
    assert stale == []


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="promtool is not installed (Debian: prometheus)")
def test_recording_rules_are_valid(tmp_path: Path) -> None:
    """The Prometheus rules of the documents pass Prometheus's own checker."""
    text = (ROOT / "docs" / "how-to" / "measure-traffic.md").read_text("utf-8")
    rules = [body for _, _, language, body in BLOCK.findall(text) if language == "yaml"]
    assert rules
    for number, body in enumerate(rules):
        path = tmp_path / f"{number}.yml"
        path.write_text(body, "utf-8")
        subprocess.run(["promtool", "check", "rules", path], check=True, capture_output=True, timeout=30)
