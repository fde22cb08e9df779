"""Scores of predictions against what happened, from pairs or arrays (n, 2)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from packer.arrays import BoolArray, FloatArray


def smape(pairs: Iterable[tuple[float, float]] | FloatArray) -> float:
    """SMAPE of (predicted, actual) in percent, 0–200 form: 100 · mean(2|p − a| / (|p| + |a|)); NaN without pairs."""
    found = _columns(pairs, np.float64)
    if not len(found):
        return float("nan")
    predicted, actual = found.T
    size = np.maximum(np.abs(predicted) + np.abs(actual), 1e-12)
    return 100.0 * float(np.mean(2.0 * np.abs(predicted - actual) / size))


def macro_f1(pairs: Iterable[tuple[bool, bool]] | BoolArray) -> float:
    """Mean F1 of both classes over (predicted, actual); 1 for a class that is neither predicted nor present."""
    found = _columns(pairs, np.bool_)
    wrong = int(np.sum(found[:, 0] != found[:, 1]))
    scores = []
    for label in (True, False):
        hit = int(np.sum(np.all(found == label, axis=1)))
        scores.append(2 * hit / (2 * hit + wrong) if hit or wrong else 1.0)
    return float(np.mean(scores))


def _columns(pairs: Iterable[tuple[Any, Any]] | npt.NDArray[Any], kind: type[np.generic]) -> npt.NDArray[Any]:
    return np.array(pairs if isinstance(pairs, np.ndarray) else list(pairs), dtype=kind).reshape(-1, 2)
