"""Standard streams of the process: closed, full and non-UTF-8 ones, signals, and how errors are reported."""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

import click

from packer.errors import KernelsNotKeptWarning
from packer.words import visible


def prepare() -> None:
    """Make standard output and error writable whatever they are; SIGTERM interrupts as Ctrl-C does.

    A closed stream becomes /dev/null, so that no file that is opened later takes its number. A character that
    the encoding of a stream lacks is written as an escape. What a library of C writes to standard output by itself, as
    HiGHS does, goes to standard error: the output of a command may be JSON.
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
    sys.unraisablehook = _unraisable
    warnings.showwarning = partial(_warned, warnings.showwarning)


def _warned(as_python: Callable[..., None], message: Warning | str, *about: Any, **more: Any) -> None:
    """A warning of packer's is one line, without the line of code."""
    if isinstance(message, KernelsNotKeptWarning):
        with suppress(OSError):
            click.echo(f"packer: {visible(message)}", err=True)
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
    """Report an error in one line on standard error, and with `as_json` as an object on standard output."""
    text = message or str(error)
    with suppress(OSError):
        if isinstance(error, click.ClickException):
            text = error.format_message()
            error.show()
        else:
            click.echo(f"packer: {text}", err=True)
    if as_json:
        import json

        about = {"type": type(error).__name__, "message": text, "exit_code": code}
        place = {name: getattr(error, name, None) for name in ("path", "row", "column", "key")}
        about |= {name: value for name, value in place.items() if value is not None}
        with suppress(OSError):
            click.echo(json.dumps({"error": about}, indent=2))
    return code
