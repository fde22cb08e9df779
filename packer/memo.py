"""Caches for values that are computed once per object."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Memo(Generic[K, V]):
    """Caches `make(key)` for the last `kept` keys, which are compared by identity. For large immutable objects, for
    which hashing takes longer than computing the value."""

    def __init__(self, make: Callable[[K], V], kept: int = 16) -> None:
        self._make, self._most = make, kept
        self._kept: dict[int, tuple[K, V]] = {}  # with the key, so that no other object gets its id

    def __call__(self, key: K) -> V:
        """The value for this object."""
        known = self._kept.get(id(key))
        if known is not None:
            return known[1]
        value = self._make(key)
        self._kept[id(key)] = key, value
        with suppress(RuntimeError, StopIteration):  # another thread has just added or removed keys
            while len(self._kept) > self._most:
                self._kept.pop(next(iter(self._kept)), None)
        return value


if TYPE_CHECKING:
    from functools import cached_property as cached_property
else:

    class cached_property:  # noqa: N801
        """`functools.cached_property` without the lock that makes threads of Python 3.11 wait for each other."""

        def __init__(self, make):
            self._make, self.__doc__ = make, make.__doc__

        def __set_name__(self, _owner, name):
            self._name = name

        def __get__(self, instance, _owner=None):
            """The value for an instance; on a class, the property itself."""
            if instance is None:
                return self
            value = instance.__dict__[self._name] = self._make(instance)
            return value
