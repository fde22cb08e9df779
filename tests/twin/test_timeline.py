"""The timeline of a simulation: what each bin saw."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import polars as pl
import pytest

from packer.adapter import Adapter
from packer.arrival import Arrivals, RequestTrace
from packer.profile import LatencySpec, Profile
from packer.twin.run import Run
from packer.twin.simulate import simulate
from packer.workload import Workload

MakeProfile = Callable[..., Profile]


def test_one_request_by_hand(make_profile: MakeProfile) -> None:
    """A request of 40 + 101 tokens from 0.5 s fills its bins as its steps do."""
    one = np.array([0])
    trace = RequestTrace(np.array([0.5]), one, np.array([40]), np.array([101]))
    workload = Workload([Adapter("a", 8, 1.0)], arrivals=Arrivals("trace", trace=trace))
    sim = simulate(workload, make_profile(kv_budget_bytes=1600.0), max_loras=1, duration_s=2.5, timeline_bin_s=1.0)
    table = sim.timeline
    assert table["time_s"].to_list() == [1.0, 2.0, 3.0]
    assert table["running"].to_list() == pytest.approx([0.5, 0.51, 0.0], abs=0.011)
    assert table["prefill_tokens"].to_list() == [40, 0, 0]
    assert table["decode_tokens"].sum() == 100
    assert table["decode_tokens"].to_list() == pytest.approx([49, 51, 0], abs=1)
    # 40 to 140 tokens are 3 to 9 of the 100 blocks
    assert sim.mean_kv_usage * 2.5 == pytest.approx(1.01 * (40 + 140) / 2 / 1600, rel=0.1)


def test_bins_cover_the_run(busy: Run) -> None:
    """There is one row for each started bin, the last one short."""
    assert busy.timeline["time_s"].to_list() == [10.0 * (k + 1) for k in range(11)]


def test_means_agree_with_the_timeline(busy: Run) -> None:
    """Time-weighted means over the bins are those of the whole run."""
    table = busy.timeline
    width = np.array([10.0] * 10 + [0.5])
    for column, mean in (("running", busy.mean_running), ("waiting", busy.mean_waiting)):
        assert (table[column].to_numpy() * width).sum() / 100.5 == pytest.approx(mean, rel=0.01)
    assert busy.mean_running > 1
    assert busy.mean_waiting > 1


def test_little_law(busy: Run) -> None:
    """Requests in the server on average = those sent per second × their mean stay in it."""
    raw = busy.raw
    left = np.where(raw.finished, raw.finish_s, busy.duration_s)
    stay_s = (left - raw.requests.time_s).sum()
    assert busy.mean_running + busy.mean_waiting == pytest.approx(stay_s / busy.duration_s, rel=0.01)


def test_preemptions_are_all_in_the_timeline(busy: Run) -> None:
    """The timeline's preemptions add up to the simulation's."""
    assert busy.timeline["preemptions"].sum() == busy.preemptions > 0


def test_a_server_is_busy_for_no_more_than_all_of_a_bin(make_profile: MakeProfile) -> None:
    """A step of 4 s fills the bins of 1 s that it spans, none of them twice."""
    slow = make_profile(latency=LatencySpec("linear", {"base_ms": 4000.0}))
    sim = simulate(Workload([Adapter("a", 8, 1.0)]), slow, max_loras=1, duration_s=40.0, timeline_bin_s=1.0)
    assert sim.server_timeline["busy_share"].max() == 1.0


def test_requests_start_no_threads_of_polars(toy_profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of requests runs no lazy query: its threads hang in processes that are forked later."""
    monkeypatch.setattr(pl.LazyFrame, "collect", None)
    run = simulate(Workload([Adapter("a", 8, 1.0)]), toy_profile, max_loras=1, duration_s=9.0)
    assert run.requests.height == run.sent > 0
