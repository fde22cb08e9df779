"""Predictors by name, and the evaluation of one server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from packer.adapter import Adapter
from packer.bin import Bin
from packer.errors import PluginError, ValidationError
from packer.evaluation import Evaluations
from packer.predictors.api import evaluate_server, load_predictor
from packer.testing.analytic import AnalyticPredictor, small_profile
from packer.workload import Workload

FLEET = Workload([Adapter("a", 8, 0.1), Adapter("b", 8, 0.1)])


@dataclass(frozen=True)
class Faulty(AnalyticPredictor):
    """A predictor of another package that raises, or returns no row."""

    raises: bool = True

    def evaluate(self, workload: Workload, bins: Sequence[Bin]) -> Evaluations:
        """An error, or nothing."""
        if self.raises:
            raise RuntimeError("boom")
        return super().evaluate(workload, [])


@pytest.mark.parametrize(
    ("raises", "message"),
    [
        (True, "The predictor 'analytic' raised RuntimeError: boom"),
        (False, "Expected 1 rows from the predictor 'analytic', got 0"),
    ],
)
def test_a_defect_of_a_predictor_names_it(raises: bool, message: str) -> None:
    """What a predictor of another package does wrong for a single server is reported with its name."""
    with pytest.raises(PluginError, match=message):
        evaluate_server(FLEET, small_profile(), max_loras=2, predictor=Faulty(raises=raises))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"predictor": 3}, "the predictor to be a Predictor, as packer.load_predictor.*, got 3"),
        ({"seed": -1}, "seed to be a whole number >= 0, got -1"),
        ({"seed": "x"}, "seed to be a whole number >= 0, got 'x'"),
    ],
)
def test_wrong_values_are_refused_with_the_rule(given: dict[str, Any], message: str) -> None:
    """A value that the predictor would ignore or stumble over is refused before."""
    with pytest.raises(ValidationError, match=message):
        evaluate_server(FLEET, small_profile(), max_loras=2, **{"predictor": AnalyticPredictor(), **given})
    if "seed" in given:
        with pytest.raises(ValidationError, match=message):
            load_predictor("twin", small_profile(), **given)
