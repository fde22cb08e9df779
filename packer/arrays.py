"""Types of the arrays that are passed around."""

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
PART = 2**18
"""Rows of a part, in `in_parts`."""
Record = Any
"""A record or an array of records: NumPy's types do not know the names of their fields."""


def record(*fields: Any) -> Any:
    """A type of records with these fields, (name, type) or (name, type, shape), aligned as C does it.

    Kernels and Python read and write a field of a record by its name: `row.field`, of an array `rows["field"]`.
    """
    return np.dtype((np.record, np.dtype(list(fields), align=True)))


def in_parts(found: Callable[[slice], IntArray], n: int) -> IntArray:
    """What is found for each part of n rows, int64 (n,): the arrays of a part stay in the processor's caches."""
    whole = np.empty(n, dtype=np.int64)
    for first in range(0, n, PART):
        part = slice(first, min(first + PART, n))
        whole[part] = found(part)
    return whole
