"""Quantiles of gamma distributions are those of SciPy, and the same bytes in any company."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from scipy.special import gammainccinv, gammaincinv, ndtr

from packer.gamma import SHAPES, normal_tail, unit_gamma

Z = np.linspace(-8.0, 8.0, 501)


def test_quantiles_are_those_of_scipy() -> None:
    """Over all shapes of the series, and beyond them, both tails agree; cv up to 1.5 to eleven digits."""
    drawn = np.exp(np.random.default_rng(0).uniform(np.log(0.01), np.log(3.16), 50))
    cvs = np.array([0.004, 0.01, 0.03, 0.1, 0.3, 0.6, 1.0, 1.5, 2.0, *drawn, 3.0, 8.0])
    shapes = cvs**-2.0
    assert (shapes[0] > SHAPES[1], shapes[-1] < SHAPES[0]) == (True, True)
    for cv, shape, found in zip(cvs, shapes, unit_gamma(shapes, Z), strict=True):
        tail = ndtr(-np.abs(Z))
        exact = np.where(Z < 0.0, gammaincinv(shape, tail), gammainccinv(shape, tail)) / shape
        usual = np.abs(Z) < 5.0  # SciPy's own from the larger tail is not exact beyond
        np.testing.assert_allclose(found[usual], exact[usual], rtol=1e-7 if cv > 1.5 else 1e-11)
        if SHAPES[0] <= shape <= SHAPES[1]:
            np.testing.assert_allclose(found, exact, rtol=1e-7 if cv > 1.5 else 1e-11)


def test_tails_of_the_normal_distribution() -> None:
    """Small tails keep their digits."""
    np.testing.assert_allclose(normal_tail(Z), ndtr(-Z), rtol=1e-13)


def test_a_shape_is_the_same_bytes_in_any_company() -> None:
    """What requests are drawn must not depend on which other adapters a fleet has."""
    shapes = np.random.default_rng(0).uniform(0.1, 200.0, 20)
    together = unit_gamma(shapes, Z)
    for k, shape in enumerate(shapes):
        assert unit_gamma(np.array([shape]), Z)[0].tobytes() == together[k].tobytes()


@pytest.mark.parametrize("wanted", ["packer.planning.recommend", "packer.twin.hours"])
def test_no_request_needs_scipy(wanted: str) -> None:
    """Its import takes a quarter of a second of each command: lengths are drawn without it."""
    program = (
        f"import sys, numpy as np, {wanted}\n"
        "from packer.lengths import Lengths\n"
        "Lengths.gamma(100.0, 0.8).sample(np.random.default_rng(0), 10)\n"
        "assert 'scipy.special' not in sys.modules and 'scipy.optimize' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
