"""Polars as `pl`, imported at first use, because the import takes tenths of a second."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any


class _Lazy(ModuleType):
    """A module that is imported when an attribute is first accessed."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


if TYPE_CHECKING:
    import polars as pl
else:
    pl = _Lazy("polars")

__all__ = ["pl"]
