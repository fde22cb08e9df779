"""The three families of trained models behind one interface: trees, kernel machines, neighbours."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from packer.predictors.ensemble import Ensemble
from packer.predictors.kernels import neighbour_rows, rbf_rows
from packer.predictors.store import Model
from packer.predictors.targets import OUTPUTS

FloatArray = npt.NDArray[np.float64]
Float32Array = npt.NDArray[np.float32]


class Family(Protocol):
    """Outputs of a model for many feature rows."""

    def rows(self, x: Float32Array, output: int) -> FloatArray:
        """Output number `output` of `packer.predictors.targets.OUTPUTS`, float64 (n,)."""
        ...


class Machine:
    """Support vectors: Σ weights·exp(−gamma·|z − vector|²) + offset, on squashed and scaled features."""

    def __init__(self, arrays: dict[str, npt.NDArray[Any]]) -> None:
        self.arrays = arrays

    def rows(self, x: Float32Array, output: int) -> FloatArray:
        """One output, float64 (n,)."""
        z = squash(x, self.arrays["center"], self.arrays["scale"])
        gamma, offset = self.arrays["constants"][output]
        out = np.full(len(x), float(offset))
        rbf_rows(z, self.arrays[f"vectors_{output}"], self.arrays[f"weights_{output}"], float(gamma), out)
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
            z = squash(x, self.arrays["center"], self.arrays["scale"])
            found = np.empty((len(x), len(OUTPUTS)))
            k = int(self.arrays["k"][0])
            neighbour_rows(z, self.arrays["points"], self.arrays["values"], k, found)
            self._last = last = (x, found)
        return last[1][:, output].copy()


def squash(x: Float32Array, center: Float32Array, scale: Float32Array) -> Float32Array:
    """Features on a scale where distances mean something: log(1 + x), centred, divided by their spread."""
    return ((np.log1p(np.maximum(x, 0.0)) - center) / scale).astype(np.float32)


def family_of(model: Model) -> Family:
    """How to evaluate a model, by its header."""
    arrays = dict(model.arrays)
    if model.header["family"] == "trees":
        whole = {
            name: arrays[name].astype(np.uint32) for name in ("feature", "left", "roots", "depths", "starts")
        }
        width = len(model.header["features"])
        return Ensemble(width, threshold=arrays["threshold"], bias=arrays["bias"], **whole)
    return Machine(arrays) if model.header["family"] == "machine" else Neighbours(arrays)
