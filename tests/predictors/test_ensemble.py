"""Compiled walks against slow ones."""

from __future__ import annotations

import numpy as np
import pytest
from naive_predictors import walk
from numba import njit

from packer.predictors.ensemble import (
    Ensemble,
    TreeNode,
    float32_below,
    from_lightgbm,
    from_sklearn,
    walk_one,
)

WIDTH = 5


@njit
def _walk_one(x, trees, first, last):  # type: ignore[no-untyped-def]
    return walk_one(x, trees, first, last)


def _random_tree(rng: np.random.Generator, depth: int) -> TreeNode:
    if depth == 0 or rng.random() < 0.2:
        return TreeNode(float(np.float32(rng.normal())))
    left, right = _random_tree(rng, depth - 1), _random_tree(rng, depth - 1)
    return TreeNode(0.0, int(rng.integers(WIDTH)), float(np.float32(rng.normal())), left, right)


@pytest.fixture(scope="module")
def grown() -> tuple[list[list[TreeNode]], Ensemble, np.ndarray]:
    """Three outputs of random trees, flattened, and questions."""
    rng = np.random.default_rng(5)
    outputs = [[_random_tree(rng, 6) for _ in range(count)] for count in (7, 1, 0)]
    x = rng.normal(size=(300, WIDTH)).astype(np.float32)
    return outputs, Ensemble.of(outputs, [0.5, 0.0, -1.0], WIDTH), x


def test_batch_walk_agrees_with_the_oracle(grown: tuple[list[list[TreeNode]], Ensemble, np.ndarray]) -> None:
    """Every question gets the sum of the leaves that it reaches, over several blocks of rows."""
    outputs, ensemble, x = grown
    for k, trees in enumerate(outputs):
        expected = [ensemble.bias[k] + sum(walk(tree, row) for tree in trees) for row in x]
        np.testing.assert_allclose(ensemble.rows(x, k), expected, rtol=1e-6, atol=1e-6)


def test_single_walk_agrees_with_the_batch(grown: tuple[list[list[TreeNode]], Ensemble, np.ndarray]) -> None:
    """One question has the same answer alone, with the trees taken four at a time and the rest."""
    _, ensemble, x = grown
    wide = np.column_stack([x, np.full(len(x), -np.inf, dtype=np.float32)])
    for k in range(3):
        trees = (ensemble, ensemble.starts[k], ensemble.starts[k + 1])
        alone = [ensemble.bias[k] + _walk_one(row, *trees) for row in wide]
        np.testing.assert_allclose(alone, ensemble.rows(x, k), rtol=1e-9, atol=1e-9)


def test_flattening_keeps_the_tree(grown: tuple[list[list[TreeNode]], Ensemble, np.ndarray]) -> None:
    """A flattened tree can be read back node by node."""
    outputs, ensemble, _ = grown
    for number, tree in enumerate([tree for trees in outputs for tree in trees]):
        assert ensemble.node(int(ensemble.roots[number])) == tree


def test_sklearn_trees_keep_their_answers() -> None:
    """A scikit-learn tree and its flattened copy agree on every row, also exactly at thresholds."""
    from sklearn.tree import DecisionTreeRegressor

    rng = np.random.default_rng(1)
    x = np.round(rng.normal(size=(500, WIDTH)), 1).astype(np.float32)
    fitted = DecisionTreeRegressor(max_leaf_nodes=40, random_state=0).fit(x, x[:, 0] * x[:, 1])
    ensemble = Ensemble.of([[from_sklearn(fitted.tree_)]], [0.0], WIDTH)
    np.testing.assert_allclose(ensemble.rows(x, 0), fitted.predict(x), rtol=1e-6, atol=1e-6)


def test_lightgbm_trees_keep_their_answers() -> None:
    """A LightGBM booster and its flattened copy agree on every row."""
    from lightgbm import LGBMRegressor

    rng = np.random.default_rng(2)
    x = rng.normal(size=(500, WIDTH)).astype(np.float32)
    y = np.sin(x[:, 0]) + x[:, 1]
    fitted = LGBMRegressor(n_estimators=20, num_leaves=8, verbosity=-1, n_jobs=1).fit(x.astype(float), y)
    ensemble = Ensemble.of([from_lightgbm(fitted.booster_)], [0.0], WIDTH)
    expected = fitted.booster_.predict(x.astype(np.float64))
    np.testing.assert_allclose(ensemble.rows(x, 0), expected, rtol=1e-5, atol=1e-5)


def test_thresholds_round_down() -> None:
    """A threshold between two float32 numbers still separates them after rounding."""
    low = np.float32(0.1)
    high = np.nextafter(low, np.float32(1.0))
    middle = (float(low) + float(high)) / 2
    assert low <= float32_below(middle) < high
