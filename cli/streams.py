"""Standard streams of the process (closed, full or not UTF-8), signals, and error reports."""

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
    """Make standard output and error writable in any state; let SIGTERM interrupt as Ctrl-C does.

    A closed stream becomes /dev/null, so that no file that is opened later takes its descriptor. Characters outside
    the encoding of a stream are written as escapes. Output that a C library such as HiGHS writes to standard output
    goes to standard error, because the output of a command may be JSON.
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
    """Print `KernelsNotKeptWarning`, and any warning with a traceback, as one line; print others as Python does."""
    first, _, rest = str(message).partition("\n")
    if isinstance(message, KernelsNotKeptWarning) or "Traceback" in rest:
        with suppress(OSError):
            click.echo(f"packer: {visible(first)}", err=True)
    else:
        as_python(message, *about, **more)


AGAIN_S = 0.05  # Time after which a lost interrupt is sent again, s.


def _unraisable(lost: sys.UnraisableHookArgs) -> None:
    """Send an interrupt again that was lost in a callback of compiled code, which can't raise it."""
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
    """Keep standard output for results, which may be JSON, in the block; plug-ins print to standard error."""
    _RESULTS.append(results())
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _RESULTS.pop()


def results() -> TextIO:
    """Stream that results are printed to."""
    return _RESULTS[-1] if _RESULTS else sys.stdout


def plain_json(text: str) -> str:
    """Escape control and formatting characters in JSON. `json.dumps` escapes only the first 32 of them."""
    return _ACTED_ON.sub(lambda found: json.dumps(found[0])[1:-1], text)


_ACTED_ON = re.compile("[\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")


def _ignore_signals() -> None:
    """Ignore signals: Python removes its handlers before it ends, and a signal then would change the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def last_words(code: int) -> int:
    """Flush the streams and return the exit code. A later signal ends the process at once, with that code."""
    _ignore_signals()
    code = flush(code)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(code))  # threads may still do work that is not needed
    return code


def flush(code: int) -> int:
    """Flush the streams. Return `code`, or 2 instead of 0 if standard output can't be written."""
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
    """Report an error in one line on standard error, and with `as_json` as an object on standard output. Addresses in
    the message, such as one given instead of a file, are shown without login and query."""
    from packer.io.web import masked

    found = error.format_message() if isinstance(error, click.ClickException) else str(error)
    text = "\n".join(map(visible, brief(masked(message or found)).split("\n")))
    helps = isinstance(
        error, getattr(click.exceptions, "NoArgsIsHelpError", ())
    )  # a group without a command: only help
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
