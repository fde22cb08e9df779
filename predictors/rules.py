"""Shallow trees as rules in words and units, and drawn as SVG, PNG or PDF."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from packer.errors import IncompatibleError, OutputError
from packer.io.files import atomic_path
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
        """As a sentence."""
        return f"if {' and '.join(self.conditions)}: {self.result}" if self.conditions else self.result


def trees_of(model: Model) -> dict[str, TreeNode]:
    """The one tree of each output; raises `IncompatibleError` where an output has more than one."""
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


def fired(model: Model, output: str, features: npt.NDArray[np.float64]) -> LeafRule:
    """The rule of one output that holds for a feature row float64 (F,)."""
    node, path = trees_of(model)[output], []
    x = features.astype(np.float32)
    while node.left is not None and node.right is not None:
        up = bool(x[node.feature] > np.float32(node.threshold))
        path.append((node.feature, node.threshold, up))
        node = node.right if up else node.left
    return LeafRule(_conditions(path), words_of(model, output, node.value))


def words_of(model: Model, output: str, value: float) -> str:
    """What the value of a leaf means, in words, with units."""
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
        low, high = (
            [at for one, at, up in path if one == feature and up == above] for above in (True, False)
        )
        found.append(condition(feature, max(low, default=None), min(high, default=None)))
    return tuple(found)


def condition(feature: int, low: float | None, high: float | None) -> str:
    """A bound on a feature in words."""
    what = FEATURES[feature]
    unit = f" {what.unit}" if what.unit else ""
    if low is None:
        return f"{what.text} ≤ {high:.4g}{unit}"
    if high is None:
        return f"{what.text} > {low:.4g}{unit}"
    return f"{low:.4g} < {what.text} ≤ {high:.4g}{unit}"


SUFFIXES = (".svg", ".png", ".pdf")
_LEAF_WIDTH = 1.9  # inches
_LEVEL_HEIGHT = 1.1


def draw_tree(model: Model, output: str, path: str | os.PathLike[str], *, force: bool = True) -> None:
    """Draw the tree of one output; yes goes to the left.

    Raises `IncompatibleError`: the model is not made of single trees; `OutputError`: the path has another suffix than
    .svg, .png, .pdf, or can't be written.
    """
    suffix = os.path.splitext(os.fspath(path))[1].lower()
    if suffix not in SUFFIXES:
        raise OutputError(f"{path}: expected one of {', '.join(SUFFIXES)}, got {suffix or 'no suffix'!r}.")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    tree = trees_of(model)[output]
    in_words = partial(words_of, model, output)
    with rc_context({"svg.hashsalt": "packer", "font.size": 7}):
        figure = Figure((max(4.0, _LEAF_WIDTH * tree.leaves), _LEVEL_HEIGHT * (tree.depth + 1)))
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set_axis_off()
        axes.set_xlim(-0.5, tree.leaves - 0.5)
        axes.set_ylim(-tree.depth - 0.5, 0.5)
        _draw(axes, tree, 0, 0, in_words)
        with atomic_path(path, force=force) as temporary:
            metadata = {"Date": None} if suffix == ".svg" else {}
            figure.savefig(temporary, format=suffix[1:], metadata=metadata)


def _draw(axes: Any, node: TreeNode, first_leaf: int, level: int, in_words: Callable[[float], str]) -> float:
    """Draw a node and all below it; returns its horizontal place."""
    if node.left is None or node.right is None:
        text = in_words(node.value).replace(" = ", " =\n").replace(" (", "\n(")
        _box(axes, first_leaf, -level, text, "#e8f0e8")
        return float(first_leaf)
    left = _draw(axes, node.left, first_leaf, level + 1, in_words)
    right = _draw(axes, node.right, first_leaf + node.left.leaves, level + 1, in_words)
    place = (left + right) / 2
    for x in (left, right):
        axes.plot([place, x], [-level, -level - 1], color="#888888", linewidth=0.8, zorder=1)
    text = textwrap.fill(condition(node.feature, None, node.threshold), 26)
    _box(axes, place, -level, text, "#eef1f7")
    return place


def _box(axes: Any, x: float, y: float, text: str, colour: str) -> None:
    box = {"boxstyle": "round,pad=0.35", "facecolor": colour, "edgecolor": "#888888", "linewidth": 0.6}
    axes.text(x, y, text, ha="center", va="center", zorder=2, bbox=box)
