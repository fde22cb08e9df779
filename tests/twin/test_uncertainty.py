"""Several seeds: their mean and its interval."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from scipy import stats
from seeds import simulate_seeds

from packer.adapter import Adapter
from packer.errors import ValidationError
from packer.lengths import Lengths
from packer.profile import Profile
from packer.twin.simulate import simulate
from packer.twin.uncertainty import intervals
from packer.workload import Workload

FLEET = Workload([Adapter(f"a{i}", 8, 0.5) for i in range(4)], Lengths.gamma(80, 1.0), Lengths.gamma(40, 1.0))


def test_seeds_count_up_in_order(make_profile: Callable[..., Profile]) -> None:
    """Run k is the simulation with seed + k, however many threads there are, and progress counts them."""
    seen: list[tuple[str, int, int]] = []
    runs = simulate_seeds(
        FLEET, make_profile(), max_loras=4, seeds=4, seed=10, jobs=2, duration_s=60.0,
        progress=lambda *step: seen.append(step),
    )  # fmt: skip
    alone = [simulate(FLEET, make_profile(), max_loras=4, duration_s=60.0, seed=10 + k).to_dict() for k in range(4)]
    assert [run.to_dict() for run in runs] == alone
    assert seen == [("simulating", k, 4) for k in range(1, 5)]


def test_interval_is_students(make_profile: Callable[..., Profile]) -> None:
    """Mean, interval and spread are those of Student's t over the runs."""
    runs = simulate_seeds(FLEET, make_profile(), max_loras=4, seeds=6, duration_s=60.0)
    values = [run.mean_ttft_ms for run in runs]
    row = {row["metric"]: row for row in intervals(runs).to_dicts()}["mean_ttft_ms"]
    expected = stats.t.interval(0.95, 5, stats.tmean(values), stats.sem(values))
    assert (row["low"], row["high"]) == pytest.approx(expected)
    assert row["mean"] == pytest.approx(stats.tmean(values))
    assert row["sd"] == pytest.approx(stats.tstd(values))
    assert row["runs"] == 6


def test_interval_holds_the_truth(make_profile: Callable[..., Profile]) -> None:
    """The 95 % interval of ten seeds holds the mean of two hundred in most of twenty tries."""
    runs = simulate_seeds(FLEET, make_profile(), max_loras=4, seeds=200, duration_s=60.0)
    truth = sum(run.total_token_throughput for run in runs) / 200
    held = 0
    for k in range(20):
        rows = {row["metric"]: row for row in intervals(runs[10 * k : 10 * k + 10]).to_dicts()}
        held += rows["total_token_throughput"]["low"] <= truth <= rows["total_token_throughput"]["high"]
    assert 16 <= held <= 20


def test_one_run_has_no_interval(make_profile: Callable[..., Profile]) -> None:
    """A single run has a mean but no interval; a metric that no run has is null."""
    nothing = Workload([Adapter("a", 8, 1e-9)])
    rows = {
        row["metric"]: row
        for row in intervals(simulate_seeds(nothing, make_profile(), max_loras=1, seeds=1, duration_s=9.0)).to_dicts()
    }
    assert (rows["sent"]["mean"], rows["sent"]["low"], rows["sent"]["runs"]) == (0.0, None, 1)
    assert (rows["mean_ttft_ms"]["mean"], rows["mean_ttft_ms"]["runs"]) == (None, 0)


def test_no_seeds_are_refused(make_profile: Callable[..., Profile]) -> None:
    """Zero seeds are an error."""
    with pytest.raises(ValidationError, match="seeds"):
        simulate_seeds(FLEET, make_profile(), max_loras=1, seeds=0)


def test_what_can_not_be_negative_has_no_negative_interval() -> None:
    """Of a time in a few runs that differ much, the interval begins at 0; a difference keeps its sign."""
    for values, below in ((0.0, 0.0, 90.0), False), ((-1.0, 0.0, 90.0), True):
        runs: Any = [SimpleNamespace(figure=value) for value in values]
        (row,) = intervals(runs, metrics=["figure"]).to_dicts()
        assert (row["low"] < 0.0) is below
        assert row["mean"] < row["high"]


def test_the_interval_of_a_share_ends_at_one() -> None:
    """Runs in which nearly all requests are within their limits leave no more than all; a time has no such end."""
    runs: Any = [SimpleNamespace(slo_attainment=share, figure=share) for share in (0.9, 1.0, 1.0)]
    share, figure = intervals(runs, metrics=["slo_attainment", "figure"]).to_dicts()
    assert share["high"] == 1.0 < figure["high"]
    assert share["low"] == figure["low"]
