"""Predictors by name, and the evaluation of one server."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from packer.adapter import Adapter
from packer.bin import Bin
from packer.errors import PluginError, ValidationError
from packer.evaluation import Evaluations
from packer.predictors.api import evaluate_server, load_predictor
from packer.testing.analytic import AnalyticPredictor, small_profile
from packer.twin.simulate import simulate
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


@dataclass(frozen=True)
class Wrong(AnalyticPredictor):
    """A predictor of another package with a wrong figure in each row."""

    figure: str = "total_token_throughput"
    value: object = -1.0

    def evaluate(self, workload: Workload, bins: Sequence[Bin]) -> Evaluations:
        """Right figures but for one."""
        rows = super().evaluate(workload, bins)
        return Evaluations.of([replace(row, **{self.figure: self.value}) for row in rows])


@pytest.mark.parametrize(
    ("figure", "value", "message"),
    [
        ("total_token_throughput", -1.0, "total_token_throughput from .*'analytic' to be a number >= 0, got"),
        ("total_token_throughput", math.nan, "total_token_throughput from .*'analytic' to be a number >= 0"),
        ("starvation_probability", 7.0, "from .*'analytic' to be a share in \\[0, 1\\], got .7"),
        ("mean_itl_ms", -0.5, "mean_itl_ms from .*'analytic'"),
        ("starved", "no", "'analytic' raised ValueError: could not convert string to float: 'no'"),
    ],
)
def test_figures_that_no_server_has_name_the_predictor(figure: str, value: object, message: str) -> None:
    """A plan is not made from figures that no server has: the predictor that gives one is named."""
    with pytest.raises(PluginError, match=message):
        evaluate_server(FLEET, small_profile(), max_loras=2, predictor=Wrong(figure=figure, value=value))


def test_an_idle_server_has_no_worst_adapter() -> None:
    """The highest p95 TTFT is unknown where no request completed, as all other latencies are."""
    idle = Workload([Adapter("a", 8, 1e-9)])
    assert math.isnan(evaluate_server(idle, small_profile(), max_loras=1, predictor="twin").worst_adapter_ttft_ms)
    sim = simulate(idle, small_profile(), max_loras=1, duration_s=10.0)
    assert sim.to_dict()["worst_adapter_ttft_ms"] is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"predictor": 3}, "predictor to be text or a path or a Predictor, got 3"),
        ({"seed": -1}, "seed to be a whole number >= 0, got -1"),
        ({"seed": "x"}, "seed to be a whole number, got 'x'"),
        ({"max_loras": []}, r"max_loras to be a whole number, got \[\]"),
    ],
)
def test_wrong_values_are_refused_with_the_rule(given: dict[str, Any], message: str) -> None:
    """A value that the predictor would ignore or stumble over is refused before."""
    with pytest.raises(ValidationError, match=message):
        evaluate_server(FLEET, small_profile(), **{"max_loras": 2, "predictor": AnalyticPredictor(), **given})
    if "seed" in given:
        with pytest.raises(ValidationError, match=message):
            load_predictor("twin", small_profile(), **given)
