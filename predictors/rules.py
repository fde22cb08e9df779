"""Shallow trees as rules in words and units."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from packer.arrays import FloatArray
from packer.errors import IncompatibleError
from packer.predictors.ensemble import Ensemble, TreeNode
from packer.predictors.families import family_of
from packer.predictors.features import COLUMN, FEATURES
from packer.predictors.store import Model
from packer.predictors.targets import OUTPUTS, STABLE, STARVED, TARGETS, probability


@dataclass(frozen=True, slots=True)
class LeafRule:
    """A path from the root to a leaf: conditions, and the result at the leaf."""

    conditions: tuple[str, ...]
    result: str

    def __str__(self) -> str:
        """Return the rule as a sentence."""
        return f"if {' and '.join(self.conditions)}: {self.result}" if self.conditions else self.result


def trees_of(model: Model) -> dict[str, TreeNode]:
    """Return the single tree of each output; raises `IncompatibleError` if an output has several."""
    ensemble = family_of(model)
    single = isinstance(ensemble, Ensemble) and bool(np.all(np.diff(ensemble.starts) <= 1))
    if not single or not isinstance(ensemble, Ensemble):
        rule = f"A predictor of the kind {model.kind!r} is not a single tree, so it has no rules; 'tree' has."
        raise IncompatibleError(rule)
    return {name: ensemble.node(int(ensemble.roots[ensemble.starts[k]])) for k, name in enumerate(OUTPUTS)}


def rules_of(model: Model, output: str) -> list[LeafRule]:
    """Every rule of one output (see `OUTPUTS`), from left to right."""
    leaves = _paths(trees_of(model)[output])
    return [LeafRule(_conditions(path), words_of(model, output, leaf.value)) for path, leaf in leaves]


def fired(model: Model, output: str, features: FloatArray) -> LeafRule:
    """The rule of one output that holds for a feature row float64 (F,)."""
    node, path = trees_of(model)[output], []
    x = features.astype(np.float32)
    while node.left is not None and node.right is not None:
        up = bool(x[node.feature] > np.float32(node.threshold))
        path.append((node.feature, node.threshold, up))
        node = node.right if up else node.left
    return LeafRule(_conditions(path), words_of(model, output, node.value))


def words_of(model: Model, output: str, value: float) -> str:
    """Return the meaning of a leaf's value in words, with units."""
    if output == STARVED:
        chance = probability(np.array([value]), *model.header["calibration"])[0]
        result = "starves" if chance >= 0.5 else "does not starve"
        return f"{result} (probability {chance:.0%})"
    if output == STABLE:
        return "the queue does not grow" if value > 0 else "the queue grows"
    base = next(target.base for target in TARGETS if target.name == output)
    name = output.removesuffix("_ms").replace("_", " ")
    return f"{name} = {math.exp(value):.3g} × {FEATURES[COLUMN[base]].text}"


def _paths(
    node: TreeNode, before: tuple[tuple[int, float, bool], ...] = ()
) -> Iterator[tuple[tuple[tuple[int, float, bool], ...], TreeNode]]:
    if node.left is None or node.right is None:
        yield before, node
        return
    yield from _paths(node.left, (*before, (node.feature, node.threshold, False)))
    yield from _paths(node.right, (*before, (node.feature, node.threshold, True)))


def _conditions(path: Sequence[tuple[int, float, bool]]) -> tuple[str, ...]:
    """Bounds of each feature along a path, merged, in order of first use."""
    found = []
    for feature in dict.fromkeys(feature for feature, _, _ in path):
        low, high = ([at for one, at, up in path if one == feature and up == above] for above in (True, False))
        found.append(condition(feature, max(low, default=None), min(high, default=None)))
    return tuple(found)


def condition(feature: int, low: float | None, high: float | None) -> str:
    """A bound on a feature in words."""
    what = FEATURES[feature]
    unit = f" {what.unit}" if what.unit else ""
    if low is None:
        return f"{what.text} ≤ {high:.4g}{unit}"
    return f"{what.text} > {low:.4g}{unit}" if high is None else f"{low:.4g} < {what.text} ≤ {high:.4g}{unit}"
