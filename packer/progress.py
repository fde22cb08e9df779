"""Callbacks that report the progress of long work."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]  # Called with (what, done, total); total 0 means unknown.


def silent(_what: str, _done: int, _total: int) -> None:
    """Report nothing."""
