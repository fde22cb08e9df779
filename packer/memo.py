"""Values that belong to an object, computed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")
KEPT = 16


class Memo(Generic[K, V]):
    """`make(key)`, kept for the last `KEPT` keys, which are compared by identity.

    For large immutable objects, whose hash would take longer than the value.
    """

    def __init__(self, make: Callable[[K], V]) -> None:
        self._make = make
        self._kept: list[tuple[K, V]] = []

    def __call__(self, key: K) -> V:
        """The value for this object."""
        for known, value in reversed(self._kept):
            if known is key:
                return value
        value = self._make(key)
        self._kept = [*self._kept[1 - KEPT :], (key, value)]
        return value
