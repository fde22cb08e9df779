"""Figures of servers and plans are declared once, with their units and the names that people see."""

from __future__ import annotations

import math
from dataclasses import fields

import numpy as np
import pytest

from packer.evaluation import FIGURES, FLAGS, PLAN_FIGURES, Evaluation, Evaluations, mean_of
from packer.planning.frontier import FrontierPoint


def row(**changes: object) -> Evaluation:
    figures = {item.name: 1.0 for item in fields(Evaluation)} | {"starved": False, "memory_error": False}
    return Evaluation(**(figures | changes))  # type: ignore[arg-type]


def test_every_figure_is_declared_once() -> None:
    """Rows, columns and the table of names have the same figures in the same order."""
    assert [item.name for item in fields(Evaluation)] == [item.name for item in fields(Evaluations)]
    assert list(FIGURES) == [item.name for item in fields(Evaluation)]
    assert set(FLAGS) < set(FIGURES)


def test_units_are_those_of_the_names() -> None:
    """A figure whose name ends in a unit is shown in that unit."""
    for suffix, unit in (("_ms", "ms"), ("_tok_s", "tok/s"), ("_tokens", "tokens")):
        assert {FIGURES[name].unit for name in FIGURES if name.endswith(suffix)} == {unit}
    assert FIGURES["mean_ttft_ms"].title == "Mean TTFT"


def test_columns_and_rows_say_the_same() -> None:
    """Evaluations made of rows give the same rows back, with Python bools and floats."""
    rows = [row(), row(starved=True, mean_itl_ms=math.inf), row(memory_error=True)]
    columns = Evaluations.of(rows)
    assert list(columns) == rows
    assert len(columns) == 3
    assert columns.feasible.tolist() == [True, False, False] == [item.feasible for item in rows]
    assert type(columns[1].starved) is bool
    assert type(columns[1].mean_itl_ms) is float


def test_unknown_figures_are_equal() -> None:
    """Two evaluations with the same figures are equal, in every version of Python, if some of them are unknown."""
    ours, other = (row(slo_used=float("nan"), p99_ttft_ms=float("nan")) for _ in range(2))
    assert ours == other
    assert len({ours, other}) == 1
    assert ours != row(slo_used=float("nan"))
    assert ours != 1.0


def test_served_share() -> None:
    """The served share is throughput / offered load, and 1 where nothing is offered."""
    assert row(offered_tok_s=10.0, total_token_throughput=9.0).served_share == pytest.approx(0.9)
    assert row(offered_tok_s=0.0, total_token_throughput=0.0).served_share == 1.0
    assert np.isclose(Evaluations.of([]).offered_tok_s.size, 0)


def test_means_are_of_what_is_known() -> None:
    """A figure that is not known, or that has no weight, does not count; without any the mean is not known."""
    assert mean_of([1.0, np.nan, 4.0, 9.0], [1.0, 5.0, 2.0, 0.0]) == pytest.approx(3.0)
    assert np.isnan(mean_of([np.nan], [1.0]))
    assert np.isnan(mean_of([], []))


def test_figures_of_a_plan_are_those_of_the_frontier() -> None:
    """Every figure over all requests that a point of the frontier has is declared, with a head of its own."""
    numbers = {f.name for f in fields(FrontierPoint) if f.type in ("float", "float | None")}
    assert set(PLAN_FIGURES) == numbers
    heads = [label.head for label in PLAN_FIGURES.values()]
    assert len(set(heads)) == len(heads)


def test_heads_of_columns_name_the_unit() -> None:
    """A short name where there is one; the unit alone where that says enough."""
    assert FIGURES["mean_ttft_ms"].head == "TTFT ms"
    assert FIGURES["total_token_throughput"].head == "tok/s"
    assert FIGURES["p99_ttft_ms"].head == "p99 TTFT ms"
    assert FIGURES["starved"].head == "starved"
