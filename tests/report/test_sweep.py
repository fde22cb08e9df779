"""The picture of a sweep."""

from __future__ import annotations

import math

import polars as pl
import pytest

from packer.report.figures import Line, Scatter
from packer.report.pictures import SWEPT, sweep_figure


@pytest.fixture
def frame() -> pl.DataFrame:
    """Two curves over the adapters, one of which ends in a memory error; offered load is common to both."""
    rows = [
        {
            "adapters": n,
            "rate_factor": 1.0,
            "max_loras": slots,
            "memory_error": slots == 64 and n == 30,
            "starved": n == 30,
            "offered_tok_s": 100.0 * n,
            "total_token_throughput": min(100.0 * n, 2000.0),
            "mean_ttft_ms": 20.0 + n,
            "mean_itl_ms": 10.0 + slots,
        }
        for n in (10, 20, 30)
        for slots in (8, 64)
    ]
    return pl.DataFrame(rows)


def _packs(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.filter(pl.col("adapters") == 20)


def test_one_panel_for_each_metric(frame: pl.DataFrame) -> None:
    """Throughput, TTFT and ITL each have a panel with one curve per server."""
    figure = sweep_figure(frame, _packs(frame), "adapters", title="t")
    assert len(figure.panels) == len(SWEPT)
    for panel in figure.panels[1:]:
        assert [line.label for line in panel.series] == ["max_loras 8", "max_loras 64"]


def test_max_pack_is_marked(frame: pl.DataFrame) -> None:
    """The fullest server stands as a mark across the throughput panel and as a point on each curve."""
    panel = sweep_figure(frame, _packs(frame), "adapters", title="t").panels[0]
    assert [(mark.at, mark.label) for mark in panel.marks] == [(20.0, "Max_pack 20")]
    (points,) = [series for series in panel.series if isinstance(series, Scatter)]
    assert points.x == (20.0, 20.0)
    assert points.y == (2000.0, 2000.0)


def test_no_max_pack_no_mark(frame: pl.DataFrame) -> None:
    """Where nothing is feasible there is nothing to mark."""
    panel = sweep_figure(frame, frame.clear(), "adapters", title="t").panels[0]
    assert not panel.marks
    assert not any(isinstance(series, Scatter) for series in panel.series)


def test_server_that_does_not_start_is_a_gap(frame: pl.DataFrame) -> None:
    """A memory error is no throughput of zero: the curve ends there."""
    panel = sweep_figure(frame, _packs(frame), "adapters", title="t").panels[0]
    (curve,) = [s for s in panel.series if isinstance(s, Line) and s.label == "max_loras 64"]
    assert curve.y[:2] == (1000.0, 2000.0)
    assert math.isnan(curve.y[2])


def test_a_server_that_starves_has_no_latency(frame: pl.DataFrame) -> None:
    """Curves of latency end where a server starves, as its completed requests alone may have been quick."""
    for panel in sweep_figure(frame, _packs(frame), "adapters", title="t").panels[1:]:
        assert [[math.isnan(y) for y in curve.y] for curve in panel.series] == 2 * [[False, False, True]]


def test_offered_load_is_drawn_where_common(frame: pl.DataFrame) -> None:
    """The offered load is one line if the curves share it, and left out if each has its own."""
    labels = [s.label for s in sweep_figure(frame, frame.clear(), "adapters", title="t").panels[0].series]
    assert "offered load" in labels
    twice = frame.with_columns(rate_factor=pl.lit(2.0), offered_tok_s=pl.col("offered_tok_s") * 2)
    both = pl.concat([frame, twice])
    series = sweep_figure(both, both.clear(), "adapters", title="t").panels[0].series
    assert "offered load" not in [s.label for s in series]
    assert "rate factor 2, max_loras 8" in [s.label for s in series]
