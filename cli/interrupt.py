"""Ctrl-C as a request: the first one ends the search with the best result so far, the second one aborts."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from packer.cli.output import note


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """A function that says whether Ctrl-C was pressed in this block."""
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
