"""Draw a shallow tree as SVG, PNG or PDF."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable
from functools import partial
from typing import Any

from packer.errors import OutputError
from packer.io.files import atomic_path
from packer.predictors.ensemble import TreeNode
from packer.predictors.rules import condition, trees_of, words_of
from packer.predictors.store import Model

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
