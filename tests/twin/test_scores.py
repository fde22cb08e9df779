"""Scores are those of the literature, from pairs or from arrays, and are defined where nothing is there."""

from __future__ import annotations

import math

import numpy as np
import pytest

from packer.twin.scores import macro_f1, smape


def test_smape_is_the_0_200_form() -> None:
    """Twice the difference over the sum; two zeros are no error, no pairs no score."""
    assert smape([(1.0, 3.0)]) == pytest.approx(100.0)
    assert smape([(0.0, 3.0), (90.0, 110.0)]) == pytest.approx(110.0)
    assert smape([(0.0, 0.0)]) == 0.0
    assert math.isnan(smape([]))
    assert smape(np.array([[1.0, 3.0]])) == pytest.approx(100.0)


def test_macro_f1_weighs_both_classes_alike() -> None:
    """A class that is neither predicted nor there counts as found."""
    assert macro_f1([(True, True), (False, False)]) == 1.0
    assert macro_f1([(True, True), (True, False)]) == pytest.approx(1 / 3)
    assert macro_f1(np.array([[True, True]])) == 1.0
