"""The output of commands: tables, JSON, notes, a progress bar, and output paths checked before long work."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from operator import gt
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import click

from packer.cli.streams import plain_json, results
from packer.errors import OutputError
from packer.io.frames import pl
from packer.progress import Progress, silent
from packer.words import number, visible

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table as RichTable

PIPE_WIDTH = 120  # Width of output to a file or pipe, columns.


def console(*, stderr: bool = False) -> Console:
    """A rich console. Colours need standard output to be a terminal and no NO_COLOR in the environment."""
    from rich.console import Console

    class Patient(Console):
        def on_broken_pipe(self) -> None:
            """The reading process has closed the output: `packer.cli.run` then ends the program without an error."""
            raise BrokenPipeError

    stream = sys.stderr if stderr else results()
    if stream.isatty():  # rich takes a terminal without cursor movement (TERM=dumb) to have 80 columns
        width, height = shutil.get_terminal_size() if os.environ.get("TERM") == "dumb" else (None, None)
    else:
        width, height = None if "COLUMNS" in os.environ else PIPE_WIDTH, None
    return Patient(file=stream, width=width, height=height, highlight=False, emoji=False, no_color=stderr or None)


def import_meanwhile(*modules: str) -> threading.Thread:
    """Import modules in a thread while simulations run, which release Python's interpreter lock. The process waits for
    the thread before it ends: modules in Rust abort if the interpreter ends during their import."""

    def load() -> None:
        with suppress(ImportError):  # raised again where the module is needed
            for name in modules:
                import_module(name)

    thread = threading.Thread(target=load)
    thread.start()
    return thread


class Table(NamedTuple):
    """Rows of plain cells (no markup in them); columns not in `left` are right-aligned."""

    title: str | None
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    left: Sequence[int] = (0,)
    caption: str | None = None


def _drawn(given: Table, width: int) -> RichTable:
    """Lay out a table for a terminal of `width` columns."""
    from rich import box
    from rich.cells import cell_len
    from rich.table import Table as RichTable
    from rich.text import Text

    built = RichTable(box=box.SIMPLE_HEAD)
    cells = [[visible(cell) for cell in row] for row in given.rows]
    columns = [[name, *(row[k] for row in cells)] for k, name in enumerate(given.columns)]
    widths = [max(map(cell_len, column)) for column in columns]
    # On a narrow terminal, break lines between words and break only the longest words. Rich would cut columns.
    words = [max(map(cell_len, " ".join(each).split()), default=1) for each in columns]
    limits = ([min(longest, word) for word in words] for longest in range(max(words, default=1), 0, -1))
    least = next((each for each in limits if sum(each) + 2 * len(each) < width), [1] * len(words))
    between = 3 if sum(least) + 3 * len(widths) < width else 2
    built.padding = (0, 1, 0, between - 2)
    room = width - between * len(widths) - 1
    while sum(widths) > room and any(map(gt, widths, least)):
        k = max((k for k in range(len(widths)) if widths[k] > least[k]), key=widths.__getitem__)
        widths[k] -= 1
    for k, name in enumerate(given.columns):
        justify: Literal["left", "right"] = "left" if k in given.left else "right"
        built.add_column(Text(name), justify=justify, overflow="fold", width=widths[k])
    for row in cells:
        built.add_row(*map(Text, row))
    return built


class Judged(NamedTuple):
    """A sentence that says whether something holds: green or red on a terminal with colours."""

    text: str
    holds: bool


Part = Table | Judged | str  # What is printed: a table, a verdict, or a line.


def show(*parts: Part) -> None:
    """Print tables and lines of plain text to standard output. On a terminal, lines are wrapped between words. A file
    or pipe gets whole lines. No line ends in blanks."""
    out = console()
    for part in parts:
        width = out.width if out.is_terminal else None
        if isinstance(part, Table):
            with out.capture() as drawn:
                out.print(_drawn(part, out.width))
            lines = wrapped(visible(part.title), width) if part.title else []
            lines += [line.rstrip() for line in drawn.get().splitlines()]
            lines += [*wrapped(visible(part.caption), width), ""] if part.caption else []
        else:
            text = part if isinstance(part, str) else part.text
            lines = wrapped(visible(text), width)
        if isinstance(part, Judged):
            out.print("\n".join(lines), markup=False, soft_wrap=True, style="green" if part.holds else "red")
        else:
            out.file.write("".join(f"{line}\n" for line in lines))
    out.file.flush()  # a file may be read while the command runs on


HANGING = re.compile(r"(.{2,10}? {2,}|- )?")  # Prefix of a line before its text: a label and blanks, or a dash.


def wrapped(text: str, width: int | None) -> list[str]:
    """Wrap a line between words at `width` columns and indent the rest to the line's text. None: do not wrap."""
    if width is None or len(text) <= width:
        return [text]
    begin = HANGING.match(text)
    indent = " " * (begin.end() if begin else 0)
    whole: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(text, width, subsequent_indent=indent, **whole)


def note(message: str, *, quiet: bool = False) -> None:
    """Print a message to standard error, unless quiet. A write error there does not stop the command."""
    if not quiet:
        width = shutil.get_terminal_size().columns if sys.stderr.isatty() else None
        with suppress(OSError):
            results().flush()  # if both streams go to one file, tables stay whole
        with suppress(OSError):
            click.echo("\n".join(wrapped(f"packer: {visible(message)}", width)), err=True)


def heads(names: Iterable[str]) -> list[str]:
    """Column heads of a server's figures."""
    from packer.evaluation import FIGURES

    return [FIGURES[name].head for name in names]


def figures(row: object, names: Iterable[str]) -> list[str]:
    """Figures of a server or a plan as cells; dashes for None."""
    from packer.evaluation import FIGURES

    return [number(None if row is None else getattr(row, name), FIGURES[name].digits) for name in names]


def json_text(data: Any, *, ascii_only: bool = False) -> str:
    """Data as JSON on several lines."""
    import json

    from packer.io.documents import jsonable

    return json.dumps(jsonable(data), indent=2, ensure_ascii=ascii_only, allow_nan=False)


def print_json(data: Any) -> None:
    """Print data as JSON to standard output."""
    utf_8 = (results().encoding or "").lower().replace("-", "") == "utf8"
    click.echo(plain_json(json_text(data, ascii_only=not utf_8)), file=results())


def write_json(data: Any, path: str | None) -> None:
    """Write data as a JSON file, if there is a path."""
    from packer.io.files import write_text

    if path is not None:
        write_text(path, json_text(data) + "\n")


def write_frame(frame: pl.DataFrame | None, path: str | None) -> None:
    """Write a table as .csv or else Parquet, if there is a path."""
    from packer.io import parquet

    if path is not None and frame is not None:
        parquet.write_frame(frame, path)


def check_distinct(path: str | os.PathLike[str]) -> None:
    """Raise `OutputError` if another parameter names the same file, or the name is a dash (standard output)."""
    if os.fspath(path).partition("/")[0] == "-":
        raise OutputError("-: expected a file; --json, and export without -o, print to standard output.")
    context = click.get_current_context(silent=True)
    named = [] if context is None else [value for value in context.params.values() if value]
    named = [each for value in named for each in (value.values() if isinstance(value, dict) else (value,))]
    texts = [each for value in named for each in (value if isinstance(value, tuple) else (value,))]
    same = [text for text in texts if isinstance(text, str) and _same_file(text.rpartition("=")[2], path)]
    if len(same) > (os.fspath(path) in same):
        raise OutputError(f"{path}: expected another file for each input and output of a command.")


def _same_file(name: str, path: str | os.PathLike[str]) -> bool:
    try:
        return os.path.realpath(name) == os.path.realpath(path) or os.path.samefile(name, path)
    except (OSError, ValueError):
        return False


@contextmanager
def progress_bar(what: str = "starting", *, quiet: bool = False) -> Iterator[Progress]:
    """Yield a function that updates a progress bar on standard error, or does nothing if that is no terminal. `what`:
    what is done before the first update."""
    if quiet or not sys.stderr.isatty():
        yield silent
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    class ProgressBars(Progress):
        """Show the bar and the remaining time only if the total is known."""

        def get_renderables(self) -> Iterable[RenderableType]:
            self.columns = whole if any(task.total for task in self.tasks) else whole[:2]
            yield self.make_tasks_table(self.tasks)

    text = TextColumn("{task.description}", markup=False)
    whole = (text, TimeElapsedColumn(), BarColumn(), TimeRemainingColumn())
    with ProgressBars(console=console(stderr=True), transient=True) as bar:
        task = bar.add_task(visible(what), total=None)

        def update(what: str, done: int, total: int) -> None:
            count = f"{visible(what)} {done:,}/{total:,}" if total else visible(what)
            bar.tasks[0].total = total or None  # update() would ignore total=None
            bar.update(task, description=count, completed=done)

        yield update


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether Ctrl-C was pressed in the block. A second Ctrl-C interrupts."""
    requested = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield requested.is_set
        return

    def handler(_signal: int, _frame: FrameType | None) -> None:
        if requested.is_set():
            raise KeyboardInterrupt
        requested.set()
        note("stopping with the best plan so far; Ctrl-C again aborts")

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield requested.is_set
    finally:
        signal.signal(signal.SIGINT, before)
