"""Convert trees of scikit-learn and LightGBM to arrays, and evaluate them.

A tree is a sequence of nodes (`feature`, `threshold`, `left`); the right child follows the left one. The left child
of a leaf is the leaf itself, and its feature is an extra column of −∞, so that a row stays at its leaf; a leaf's
`threshold` is its value. Every row therefore takes the same number of steps through a tree, without branches.
Indices are unsigned, because tests for negative indices would take half of the kernel's time.
`tests/oracles/naive_predictors.py` is the slow reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from packer.arrays import Float32Array, FloatArray
from packer.twin.flags import CALLED

UintArray = npt.NDArray[np.uint32]


@njit(**CALLED)
def walk_one(x: Float32Array, trees: Ensemble, first: int, last: int) -> float:
    """Sum the leaves of the trees first … last − 1 for one row of features x float32 (F + 1,), whose last is −∞."""
    feature, threshold, left, roots, depths, _starts, _bias = trees
    total = 0.0
    t = first
    while t + 4 <= last:  # four at a time: their memory accesses overlap
        a, b, c, d = roots[t], roots[t + 1], roots[t + 2], roots[t + 3]
        deepest = max(max(depths[t], depths[t + 1]), max(depths[t + 2], depths[t + 3]))
        for _ in range(deepest):
            a = left[a] + (x[feature[a]] > threshold[a])
            b = left[b] + (x[feature[b]] > threshold[b])
            c = left[c] + (x[feature[c]] > threshold[c])
            d = left[d] + (x[feature[d]] > threshold[d])
        total = total + threshold[a] + threshold[b] + threshold[c] + threshold[d]
        t += 4
    while t < last:
        a = roots[t]
        for _ in range(depths[t]):
            a = left[a] + (x[feature[a]] > threshold[a])
        total += threshold[a]
        t += 1
    return total


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A node of one tree: a leaf with a value, or `x[feature] <= threshold` to the left, else right."""

    value: float
    feature: int = -1
    threshold: float = 0.0
    left: TreeNode | None = None
    right: TreeNode | None = None

    @property
    def leaves(self) -> int:
        """Number of leaves at or below this node."""
        return 1 if self.left is None or self.right is None else self.left.leaves + self.right.leaves

    @property
    def depth(self) -> int:
        """Steps from this node to the deepest leaf."""
        return 0 if self.left is None or self.right is None else 1 + max(self.left.depth, self.right.depth)


class Ensemble(NamedTuple):
    """Flattened trees of several outputs, in groups.

    `feature`, `threshold`, `left`: uint32, float32, uint32 (nodes,): see the module's docstring.
    `roots`, `depths`: uint32 (trees,).
    `starts`: uint32 (outputs + 1,): output k is the sum over the trees starts[k] … starts[k + 1] − 1, plus bias[k].
    `bias`: float64 (outputs,).
    """

    feature: UintArray
    threshold: Float32Array
    left: UintArray
    roots: UintArray
    depths: UintArray
    starts: UintArray
    bias: FloatArray

    @classmethod
    def of(cls, outputs: Sequence[Sequence[TreeNode]], biases: Sequence[float], width: int) -> Ensemble:
        """Flatten trees of `width` features, breadth first, so that siblings are neighbours."""
        nodes: list[tuple[int, float, int]] = []
        roots: list[int] = []
        depths: list[int] = []
        starts = [0]
        for trees in outputs:
            for tree in trees:
                roots.append(len(nodes))
                depths.append(tree.depth)
                _flatten(tree, width, nodes)
            starts.append(len(roots))
        table = np.array(nodes, dtype=[("feature", "u4"), ("threshold", "f4"), ("left", "u4")])
        whole = (np.array(each, dtype=np.uint32) for each in (roots, depths, starts))
        columns = (table[name].copy() for name in ("feature", "threshold", "left"))
        return cls._make([*columns, *whole, np.array(biases, dtype=np.float64)])

    def rows(self, x: Float32Array, output: int) -> FloatArray:
        """One output for feature rows x float32 (n, F), float64 (n,)."""
        out, wide = np.full(len(x), self.bias[output]), np.column_stack([x, np.full(len(x), -np.inf, x.dtype)])
        for t in range(self.starts[output], self.starts[output + 1]):
            node = np.full(len(x), self.roots[t])
            for _ in range(self.depths[t]):
                node = self.left[node] + (wide[np.arange(len(x)), self.feature[node]] > self.threshold[node])
            out += self.threshold[node]
        return out

    def node(self, at: int) -> TreeNode:
        """Return the subtree at a node; the values of inner nodes are not stored."""
        if self.left[at] == at:
            return TreeNode(float(self.threshold[at]))
        left, right = (self.node(int(self.left[at]) + k) for k in (0, 1))
        return TreeNode(0.0, int(self.feature[at]), float(self.threshold[at]), left, right)


def _flatten(tree: TreeNode, width: int, nodes: list[tuple[int, float, int]]) -> None:
    """Append the feature, threshold (or value) and left child of each node."""
    waiting, base, placed = [tree], len(nodes), 1
    for node in waiting:  # grows as it is walked
        if node.left is None or node.right is None:
            nodes.append((width, node.value, len(nodes)))
            continue
        nodes.append((node.feature, float(float32_below(node.threshold)), base + placed))
        placed += 2
        waiting += [node.left, node.right]


def packed(outputs: Sequence[Sequence[TreeNode]], width: int) -> dict[str, npt.NDArray[Any]]:
    """Return the trees of each output as arrays by name, in the types of saved files."""
    arrays = Ensemble.of(outputs, [0.0] * len(outputs), width)._asdict()
    return {name: each.astype(np.int32) if each.dtype == np.uint32 else each for name, each in arrays.items()}


def float32_below(value: float) -> np.float32:
    """The largest float32 that is not above `value`, so that comparisons with float32 features agree."""
    near = np.float32(value)
    return near if float(near) <= value else np.nextafter(near, np.float32(-np.inf))


def from_sklearn(tree: Any, scale: float = 1.0, output: int = 0) -> TreeNode:
    """A fitted scikit-learn tree (`estimator.tree_`) as nodes; leaf values times `scale`."""

    def node(at: int) -> TreeNode:
        value = float(tree.value[at, 0, output]) * scale
        if tree.children_left[at] < 0:
            return TreeNode(value)
        left, right = node(tree.children_left[at]), node(tree.children_right[at])
        return TreeNode(value, int(tree.feature[at]), float(tree.threshold[at]), left, right)

    return node(0)


def from_lightgbm(booster: Any) -> list[TreeNode]:
    """The trees of a fitted LightGBM booster as nodes."""

    def node(raw: dict[str, Any]) -> TreeNode:
        if "leaf_value" in raw:
            return TreeNode(float(raw["leaf_value"]))
        value, feature = float(raw["internal_value"]), int(raw["split_feature"])
        left, right = node(raw["left_child"]), node(raw["right_child"])
        return TreeNode(value, feature, float(raw["threshold"]), left, right)

    return [node(info["tree_structure"]) for info in booster.dump_model()["tree_info"]]
