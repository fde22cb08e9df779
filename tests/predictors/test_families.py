"""Kernel machines and neighbours give what their formulas say, for any number of rows."""

from __future__ import annotations

import numpy as np

from packer.predictors.families import BLOCK, Machine, Neighbours, squash


def test_machines_agree_with_the_formula() -> None:
    """Support vectors: Σ weights · exp(−gamma · |z − vector|²) + offset; an output without vectors is its offset."""
    rng = np.random.default_rng(3)
    x = rng.random((BLOCK + 9, 4)).astype(np.float32)
    center, scale = rng.random(4).astype(np.float32), rng.random(4).astype(np.float32) + 0.5
    vectors, weights = rng.normal(size=(6, 4)).astype(np.float32), rng.normal(size=6).astype(np.float32)
    arrays = {
        "center": center,
        "scale": scale,
        "constants": np.array([[0.3, 0.25], [0.0, 2.0]]),
        "vectors_0": vectors,
        "weights_0": weights,
        "vectors_1": vectors[:0],
        "weights_1": weights[:0],
    }
    z = squash(x, center, scale).astype(float)
    gaps = ((z[:, None, :] - vectors[None].astype(float)) ** 2).sum(2)
    machine = Machine(arrays)
    np.testing.assert_allclose(machine.rows(x, 0), 0.25 + np.exp(-0.3 * gaps) @ weights, rtol=1e-5)
    assert (machine.rows(x, 1) == 2.0).all()


def test_neighbours_agree_with_a_sort() -> None:
    """The k nearest points, weighted by 1 / distance."""
    rng = np.random.default_rng(4)
    x, points = rng.random((8, 3)).astype(np.float32), rng.normal(size=(50, 3)).astype(np.float32)
    values = rng.normal(size=(50, 2)).astype(np.float32)
    for k in (1, 5):
        arrays = {"points": points, "values": values, "k": np.array([k])}
        arrays |= {"center": np.zeros(3, np.float32), "scale": np.ones(3, np.float32)}
        found = Neighbours(arrays)
        for i, z in enumerate(squash(x, arrays["center"], arrays["scale"]).astype(float)):
            distance = np.sqrt(((z - points) ** 2).sum(1))
            near = np.argsort(distance)[:k]
            weight = 1 / (distance[near] + 1e-6)
            wanted = weight @ values[near] / weight.sum()
            np.testing.assert_allclose([found.rows(x, 0)[i], found.rows(x, 1)[i]], wanted, rtol=1e-4)
