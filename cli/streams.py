"""Standard streams of the process: closed, full and non-UTF-8 ones, signals, and how errors are reported."""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from functools import partial
from types import FrameType
from typing import Any, TextIO

import click

from packer.errors import KernelsNotKeptWarning, brief
from packer.words import visible


def prepare() -> None:
    """Make standard output and error writable whatever they are; SIGTERM interrupts as Ctrl-C does.

    A closed stream becomes /dev/null, so that no file that is opened later takes its number. A character that
    is not in the encoding of a stream is written as an escape. What a library of C writes to standard output by
    itself, as HiGHS does, goes to standard error: the output of a command may be JSON.
    """
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(handle)
    encoding = sys.stdout.encoding if sys.stdout else None
    sys.stdout = open(os.dup(1), "w", encoding=encoding)  # noqa: SIM115  (open as long as the process)
    sys.__stdout__ = sys.stdout  # type: ignore[misc]  # libraries query the width of the terminal there
    os.dup2(2, 1)
    sys.stderr = sys.stderr or open(2, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # by packer/__init__.py
        signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit.register(_ignore_signals)
    sys.unraisablehook = _unraisable
    warnings.showwarning = partial(_warned, warnings.showwarning)


def _warned(as_python: Callable[..., None], message: Warning | str, *about: Any, **more: Any) -> None:
    """A warning of packer's is one line, without the line of code, and so is one that holds a traceback."""
    first, _, rest = str(message).partition("\n")
    if isinstance(message, KernelsNotKeptWarning) or "Traceback" in rest:
        with suppress(OSError):
            click.echo(f"packer: {visible(first)}", err=True)
    else:
        as_python(message, *about, **more)


AGAIN_S = 0.05
"""Time after which an interrupt that was lost comes again."""


def _unraisable(lost: sys.UnraisableHookArgs) -> None:
    """An interrupt that falls into a callback of compiled code, which can't raise it, comes again soon after it."""
    if not issubclass(lost.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(lost)
        return
    signal.signal(signal.SIGTERM, _interrupt)
    again = threading.Timer(AGAIN_S, os.kill, (os.getpid(), signal.SIGTERM))
    again.daemon = True
    again.start()


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends the process at once
    raise KeyboardInterrupt


_RESULTS: list[TextIO] = []


@contextmanager
def only_results() -> Iterator[None]:
    """Standard output is for results in the block: whatever else is printed goes to standard error.

    A strategy of another package may print, and a result may be JSON.
    """
    _RESULTS.append(results())
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _RESULTS.pop()


def results() -> TextIO:
    """Where results are printed."""
    return _RESULTS[-1] if _RESULTS else sys.stdout


def plain_json(text: str) -> str:
    """JSON without characters that a terminal acts on: of those, `json.dumps` escapes the first 32 alone."""
    return _ACTED_ON.sub(lambda found: json.dumps(found[0])[1:-1], text)


_ACTED_ON = re.compile("[\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")


def _ignore_signals() -> None:
    """Python takes its handlers back before it ends: a signal in between would change the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def last_words(code: int) -> int:
    """Write what is buffered; Ctrl-C then changes nothing any more. Returns the exit code."""
    _ignore_signals()
    code = flush(code)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(code))  # threads may still work on what is not needed
    return code


def flush(code: int) -> int:
    """Write what is buffered; the exit code, which is 2 if standard output could not take it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            _discard(stream.fileno())
        except OSError as error:
            _discard(stream.fileno())
            if stream is sys.stdout:
                code = fail(OSError(f"standard output can't be written: {error}"), code or 2)
    return code


def _discard(number: int) -> None:
    """Send the rest of a stream to /dev/null: Python flushes it once more when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)


def fail(error: BaseException, code: int, *, message: str = "", as_json: bool = False) -> int:
    """Report an error in one line on standard error, and with `as_json` as an object on standard output.

    An address that was given where a file belongs, or that code of others names, shows neither login nor query.
    """
    from packer.io.web import masked

    found = error.format_message() if isinstance(error, click.ClickException) else str(error)
    text = "\n".join(map(visible, brief(masked(message or found)).split("\n")))
    helps = isinstance(
        error, getattr(click.exceptions, "NoArgsIsHelpError", ())
    )  # a group alone: no error to name
    with suppress(OSError):
        if helps:
            click.echo(found, err=True)
        elif isinstance(error, click.ClickException):
            context = error.ctx if isinstance(error, click.UsageError) else None
            click.UsageError(text, context).show()
        else:
            click.echo(f"packer: {text}", err=True)
    if as_json:
        about = {"type": type(error).__name__, "message": text, "exit_code": code}
        place = {name: getattr(error, name, None) for name in ("path", "row", "column", "key")}
        shown = {name: masked(value) if isinstance(value, str) else value for name, value in place.items()}
        about |= {name: value for name, value in shown.items() if value is not None}
        with suppress(OSError):
            click.echo(plain_json(json.dumps({"error": about}, indent=2)), file=results())
    return code
