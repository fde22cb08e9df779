"""The output of commands."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from packer.cli import output, run, streams
from packer.cli.options import numbers

Capture = pytest.CaptureFixture[str]


def test_json_has_no_nan_and_no_numpy(capsys: Capture) -> None:
    """What is printed is strict JSON: no NaN, and arrays as lists."""
    data = {"a": math.nan, "b": np.array([1.5, math.inf]), "c": (np.int64(3), np.bool_(True)), 4: {"x"}, "d": "é"}
    output.print_json(data)
    text = capsys.readouterr().out
    assert json.loads(text, parse_constant=pytest.fail) == {
        "a": None,
        "b": [1.5, None],
        "c": [3, True],
        "4": ["x"],
        "d": "é",
    }


def test_names_cannot_command_the_terminal(capsys: Capture) -> None:
    """Markup and names of emoji stay text, and control characters are shown as escapes."""
    output.show(output.Judged("keeps :rocket:", holds=True))
    assert capsys.readouterr().out == "keeps :rocket:\n"
    output.show("line \x1b[31m", output.Table("[b]title[/b]", ["[red]c"], [["[bold]x\x1b]0;y\x07\u202e"]]))
    text = capsys.readouterr().out
    assert "\x1b" not in text
    for part in (r"line \x1b[31m", "[b]title[/b]", "[red]c", r"[bold]x\x1b]0;y\x07\u202e"):
        assert part in text
    output.note("\x1b[2J")
    assert capsys.readouterr().err == "packer: \\x1b[2J\n"
    output.note("hidden", quiet=True)
    assert capsys.readouterr().err == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        """Claim to be one."""
        return True


@pytest.mark.parametrize(
    ("terminal", "quiet", "drawn"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_progress_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch, terminal: bool, quiet: bool, drawn: bool) -> None:
    """A progress bar goes to a terminal's standard error alone."""
    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with output.progress_bar(quiet=quiet) as update:
        update("packing", 1, 2)
        update("unknown", 1, 0)
    assert bool(stream.getvalue()) is drawn


def test_reading_a_log_is_said_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long logs take a minute to read: who waits is told why."""
    path = tmp_path / "access.jsonl"
    line = '{{"time": {}, "model": "a", "prompt_tokens": 9, "completion_tokens": 9}}\n'
    path.write_text("".join(map(line.format, range(60))))
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    assert run(["workload", "from-log", str(path), "--rank", "8", "-o", str(tmp_path / "fleet.csv")]) == 0
    assert f"reading {path}" in stream.getvalue()


@pytest.mark.parametrize("width", [60, 80])
def test_narrow_tables_cut_nothing(width: int, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every word of a table stands whole within the terminal, the last column's too."""
    monkeypatch.setenv("COLUMNS", str(width))
    heads = ["server", "adapters by rank", "max_loras × rank", "worst p95 ms", "ITL ms", "headroom"]
    row = ["10", "77×r16, 82×r8, 3×r64", "128 × 16", "191,162", "36.5", "> +300%"]
    output.show(output.Table("Servers", heads, [row, row]))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert all(line == line.rstrip() for line in lines)
    words = " ".join(lines).split()
    assert all(word in words for word in " ".join([*heads, *row]).split())


@pytest.mark.parametrize(("width", "kind"), [(60, "l40s/llama-3.1-8b-instruct"), (40, "l40s/llama-3.1")])
def test_a_table_breaks_its_longest_words_only(
    width: int, kind: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long name is broken only where the table has no room for it, and no other word is."""
    monkeypatch.setenv("COLUMNS", str(width))
    row = ["0", "l40s/llama-3.1-8b-instruct", "step time: ITL 110 ms with 181 requests running"]
    output.show(output.Table("", ["server", "kind", "headroom"], [row, row]))
    head, _, first, *_ = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert head.split() == ["server", "kind", "headroom"]
    assert kind in first


@pytest.mark.parametrize("width", [40, 90])
def test_lines_break_between_words(width: int) -> None:
    """No word is cut, lines go on below where their text begins, and a pipe gets a line whole."""
    text = "Status      feasible; 2 GPUs, at least 2 GPUs are needed; verified on a fresh hour: it holds"
    lines = output.wrapped(text, width)
    assert " ".join(" ".join(lines).split()) == " ".join(text.split())
    assert all(len(line) <= width for line in lines)
    assert all(line.startswith(12 * " ") for line in lines[1:])
    assert output.wrapped(text, None) == [text]


def test_a_note_comes_after_the_table_above_it() -> None:
    """Where output and messages go to one file, what was printed first stands first."""
    code = (
        "from packer.cli import output, streams\n"
        "with streams.only_results():\n    output.show('table'); output.note('wrote it')"
    )
    both = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
    )
    assert both.stdout.splitlines() == ["table", "packer: wrote it"]


def test_only_verdicts_have_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    """What holds is green and what breaks red on a terminal; no other line has a colour."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    output.show("plain", output.Judged("holds", holds=True), output.Judged("breaks", holds=False))
    plain, holds, breaks = stream.getvalue().splitlines()
    assert plain == "plain"
    assert holds.startswith("\x1b[32mholds")
    assert breaks.startswith("\x1b[31mbreaks")


def test_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    """NO_COLOR in the environment wins even on a terminal."""
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert output.console().color_system is not None
    monkeypatch.setenv("NO_COLOR", "1")
    assert output.console().no_color


def test_a_terminal_without_cursor_movement_has_its_own_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """On TERM=dumb, such as an editor's shell, lines are as wide as the terminal, not as 80 columns."""
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("TERM", "dumb")
    for width in (60, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        assert output.console().width == width


def test_number_lists() -> None:
    """Lists are numbers with commas between them, spans with a step, and of a grid all between two numbers."""
    assert numbers(int)("8:16:4,8") == (8, 12, 16, 8)
    assert numbers(int, distinct=True)("8:16:4,8") == (8, 12, 16)
    assert numbers(int, grid=(1, 2, 4, 8))("2..7") == (2, 4, 7)
    assert numbers(int)("8,16") == (8, 16)
    assert numbers(float)("0.1") == (0.1,)
    for text in ("", "1,", "1;2", "x"):
        with pytest.raises(Exception, match="8,16,32"):
            numbers(float)(text)


def test_what_prints_is_imported_meanwhile() -> None:
    """Modules are imported in a thread; one that is not there is left to whoever needs it."""
    sys.modules.pop("this", None)
    with contextlib.redirect_stdout(io.StringIO()):
        output.import_meanwhile("this", "packer.no_such_module").join()
    assert "this" in sys.modules


def test_a_command_ends_after_the_imports_that_it_began(tmp_path: Path) -> None:
    """The interpreter does not end during an import in a thread: a module in Rust would abort."""
    (tmp_path / "slow_module.py").write_text("import time\ntime.sleep(0.3)\nprint('imported')\n")
    code = "from packer.cli.output import import_meanwhile; import_meanwhile('slow_module')"
    there = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=there)
    assert (ended.stdout, ended.stderr) == ("imported\n", "")


def test_what_is_printed_is_there_at_once(tmp_path: Path) -> None:
    """A file with the output of a command that runs on, as live follow, can be read before the command ends."""
    path = tmp_path / "out"
    with path.open("w") as file, contextlib.redirect_stdout(file), streams.only_results():
        output.show("2 steps done")
        assert path.read_text() == "2 steps done\n"
