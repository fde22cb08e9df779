"""Check the arrays of a saved model, because the kernels that read them check no index and no shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from packer.arrays import IntArray

LARGEST_LEAF = 500.0  # Leaves' logarithms must have finite exponentials; those of trained models are below 20.

Arrays = Mapping[str, npt.NDArray[Any]]


def check_arrays(family: str, arrays: Arrays, features: int, outputs: int) -> None:
    """Raise `ValueError` unless the kernels of a family can evaluate these arrays.

    `family`: "trees", "machine" or "neighbours".
    `arrays`: by name, as `packer.predictors.store` reads them.
    `features`, `outputs`: numbers of features and outputs of the model.
    """
    for name, array in arrays.items():
        _require(bool(np.isfinite(array).all()), name, "finite")
    if family == "trees":
        _check_trees(arrays, features, outputs)
        return
    _shape(arrays, "center", np.float32, features)
    _shape(arrays, "scale", np.float32, features)
    _require(bool((arrays["scale"] > 0.0009).all()), "scale", ">= 0.001, as training makes it")
    for name, array in arrays.items():
        _require(bool((np.abs(array) <= 1e6).all()), name, "within ±1e6, so that distances are finite")
    if family == "machine":
        _shape(arrays, "constants", np.float64, outputs, 2)
        _require(bool((arrays["constants"][:, 0] >= 0).all()), "constants", ">= 0")
        for k in range(outputs):
            _shape(arrays, f"vectors_{k}", np.float32, None, features)
            _shape(arrays, f"weights_{k}", np.float32, len(arrays[f"vectors_{k}"]))
    else:
        _shape(arrays, "points", np.float32, None, features)
        _shape(arrays, "values", np.float32, len(arrays["points"]), outputs)
        _shape(arrays, "k", np.int64, 1)
        _require(1 <= int(arrays["k"][0]) <= len(arrays["points"]), "k", "between 1 and the number of points")


def _check_trees(arrays: Arrays, features: int, outputs: int) -> None:
    """Check that nodes form trees of depths `depths`: children follow their parent, and each has one parent."""
    _shape(arrays, "threshold", np.float32, None)
    _shape(arrays, "bias", np.float64, outputs)
    n = len(arrays["threshold"])
    feature, left = (_integers(arrays, name, n) for name in ("feature", "left"))
    roots = _integers(arrays, "roots", None)
    depths = _integers(arrays, "depths", len(roots))
    starts = _integers(arrays, "starts", outputs + 1)
    rising = starts[0] == 0 and starts[-1] == len(roots) and (np.diff(starts) >= 0).all()
    _require(bool(rising), "starts", f"sorted from 0 to {len(roots)}")
    node = np.arange(n)
    inner = left != node
    _require(bool(((left > node) & (left < n - 1))[inner].all()), "left", "behind each node")
    _require(bool((feature[inner] < features).all()), "feature", f"< {features}")
    _require(bool((feature[~inner] == features).all()), "feature", f"{features} in leaves")
    leaves = np.abs(arrays["threshold"][~inner])
    _require(bool((leaves <= LARGEST_LEAF).all()), "threshold", f"within ±{LARGEST_LEAF:g} in leaves")
    _require(bool((roots < n).all()), "roots", f"< {n}")
    parents = np.bincount(np.concatenate([roots, left[inner], left[inner] + 1]), minlength=n)
    _require(bool((parents <= 1).all()), "left", "the children of one node each")
    deepest = np.zeros(len(roots), dtype=np.int64)
    tree, at = np.arange(len(roots)), roots
    for depth in range(n):
        deepest[tree] = depth
        on = inner[at]
        tree, at = np.repeat(tree[on], 2), np.repeat(left[at[on]], 2)
        at[1::2] += 1
        if not len(at):
            break
    _require(bool((deepest == depths).all()), "depths", "the depths of the trees")


def _integers(arrays: Arrays, name: str, length: int | None) -> IntArray:
    _shape(arrays, name, np.int32, length)
    _require(bool((arrays[name] >= 0).all()), name, ">= 0")
    return arrays[name].astype(np.int64)


def _shape(arrays: Arrays, name: str, dtype: type, *shape: int | None) -> None:
    if name not in arrays:
        raise ValueError(f"the array {name!r} is missing")
    array = arrays[name]
    fits = (want in (None, got) for want, got in zip(shape, array.shape, strict=False))
    same = array.ndim == len(shape) and all(fits)
    _require(array.dtype == dtype and same, name, f"{np.dtype(dtype)} of the shape {shape}")


def _require(holds: bool, name: str, rule: str) -> None:
    if not holds:
        raise ValueError(f"expected the array {name!r} to be {rule}")
