"""Types of arrays, and helpers to make them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
Float32Array = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
ByteArray = npt.NDArray[np.int8]
PART = 2**18  # Number of rows of a part in `in_parts`.
Record = Any  # A record or an array of records: NumPy's types do not know the names of their fields.


def record(*fields: Any) -> Any:
    """A record type with these fields, (name, type) or (name, type, shape), aligned as in C. Kernels and Python access
    a field by name: `row.field` of a record, `rows["field"]` of an array of records."""
    return np.dtype((np.record, np.dtype(list(fields), align=True)))


def in_parts(found: Callable[[slice], IntArray], n: int) -> IntArray:
    """`found` for each part of n rows, concatenated, int64 (n,): arrays of one part fit into the CPU's caches."""
    whole = np.empty(n, dtype=np.int64)
    for first in range(0, n, PART):
        part = slice(first, min(first + PART, n))
        whole[part] = found(part)
    return whole


def distinct(values: npt.NDArray[Any], axis: int | None = None) -> npt.NDArray[Any]:
    """The sorted distinct values, or rows (`axis` 0). `np.unique` imports `numpy.ma`, which takes long."""
    found: npt.NDArray[Any] = np.unique(values, axis=axis, return_counts=True)[0]
    return found


def own(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array, if it is read-only, else a read-only copy: its owner may change it later."""
    if column.flags.writeable:
        column = column.copy()
        column.setflags(write=False)
    return column
