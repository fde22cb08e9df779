"""The three families of trained models behind one interface: trees, kernel machines, neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from packer.arrays import Float32Array, FloatArray
from packer.predictors.ensemble import Ensemble
from packer.predictors.store import Model

BLOCK = 1024  # Rows evaluated at a time, so that the table of distances to all support vectors stays small.
CLOSEST = 1e-6  # Added to every distance, so that a point at distance 0 has a finite weight.


@dataclass(frozen=True)
class Machine:
    """Support vectors: Σ weights·exp(−gamma·|z − vector|²) + offset, on squashed and scaled features."""

    arrays: dict[str, npt.NDArray[Any]]

    def rows(self, x: Float32Array, output: int) -> FloatArray:
        """One output, float64 (n,)."""
        from scipy.spatial.distance import cdist

        z = squash(x, self.arrays["center"], self.arrays["scale"])
        gamma, offset = self.arrays["constants"][output]
        vectors, weights = self.arrays[f"vectors_{output}"], self.arrays[f"weights_{output}"]
        out = np.full(len(x), float(offset))
        for start in range(0, len(x) if len(vectors) else 0, BLOCK):
            part = slice(start, start + BLOCK)
            out[part] += np.exp(-gamma * cdist(z[part], vectors, "sqeuclidean")) @ weights
        return out


class Neighbours:
    """Means over the nearest training points, on squashed and scaled features."""

    def __init__(self, arrays: dict[str, npt.NDArray[Any]]) -> None:
        self.arrays = arrays
        self._last: tuple[Float32Array, FloatArray] | None = None

    def rows(self, x: Float32Array, output: int) -> FloatArray:
        """One output, float64 (n,); the search is done once for all outputs of the same rows."""
        last = self._last
        if last is None or last[0] is not x:
            from scipy.spatial import KDTree

            z = squash(x, self.arrays["center"], self.arrays["scale"])
            distance, near = KDTree(self.arrays["points"]).query(z, np.arange(1, int(self.arrays["k"][0]) + 1))
            weight = 1.0 / (distance + CLOSEST)
            found = (weight[:, :, None] * self.arrays["values"][near]).sum(1) / weight.sum(1, keepdims=True)
            self._last = last = (x, found)
        return last[1][:, output].copy()


def squash(x: Float32Array, center: Float32Array, scale: Float32Array) -> Float32Array:
    """Scale features so that distances are meaningful: log(1 + x), centred, divided by the spread."""
    return ((np.log1p(np.maximum(x, 0.0)) - center) / scale).astype(np.float32)


def family_of(model: Model) -> Ensemble | Machine | Neighbours:
    """Return a model's evaluator by its header: `rows(x, k)` is output k of `packer.predictors.targets.OUTPUTS`."""
    arrays = dict(model.arrays)
    if model.header["family"] == "trees":
        whole = (arrays[name] for name in Ensemble._fields)
        return Ensemble._make(each.astype(np.uint32) if each.dtype == np.int32 else each for each in whole)
    return Machine(arrays) if model.header["family"] == "machine" else Neighbours(arrays)
