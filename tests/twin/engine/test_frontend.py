"""The front end delays what the client sees, not what the engine does beyond the delay of arrivals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numba import njit

from packer.adapter import Adapter
from packer.arrays import Record
from packer.arrival import Arrivals, RequestTrace
from packer.io.profiles import load_profile
from packer.lengths import Lengths
from packer.profile import FrontEndSpec, Profile
from packer.twin.engine import frontend
from packer.twin.engine.state import ADAPTER
from packer.twin.simulate import simulate
from packer.workload import Workload

COSTS = FrontEndSpec(
    scrape_base_ms=5.0, scrape_per_series_ms=0.02, scrape_per_name_ms=0.0002, request_ms=0.0, first_use_ms=0.0
)


@pytest.fixture(scope="module")
def fleet() -> Workload:
    """Sixty-four adapters that keep the sets of running adapters changing."""
    adapters = [Adapter(f"a{i}", 8, 0.08) for i in range(64)]
    return Workload(adapters, Lengths.gamma(223.0, 1.1), Lengths.gamma(196.0, 1.04))


@pytest.fixture(scope="module")
def profile() -> Profile:
    """A shipped server whose front end costs only scrapes."""
    return replace(load_profile("h100-64gb/llama-3.1-8b-instruct"), frontend=COSTS)


def test_nobody_scrapes_by_default(fleet: Workload, profile: Profile) -> None:
    """Without an interval nothing is counted and nothing stalls: the client sees the engine's times."""
    sim = simulate(fleet, profile, max_loras=64, duration_s=300)
    assert sim.metric_series == 0
    assert sim.mean_ttft_ms == pytest.approx(sim.engine_mean_ttft_ms)
    assert sim.mean_tpot_ms == pytest.approx(sim.engine_mean_tpot_ms)


def test_scrapes_stall_the_client_more_and_more(fleet: Workload, profile: Profile) -> None:
    """Series accumulate, so that later requests wait longer than early ones; the engine hardly notices."""
    quiet = simulate(fleet, profile, max_loras=64, duration_s=900)
    scraped = simulate(fleet, profile, max_loras=64, duration_s=900, scrape_interval_s=2.0)
    rarely = simulate(fleet, profile, max_loras=64, duration_s=900, scrape_interval_s=60.0)
    assert scraped.metric_series > 1000
    assert scraped.metric_names > scraped.metric_series
    assert scraped.mean_ttft_ms > 1.05 * quiet.mean_ttft_ms
    assert quiet.mean_ttft_ms < rarely.mean_ttft_ms < scraped.mean_ttft_ms
    assert scraped.engine_mean_tpot_ms == pytest.approx(quiet.engine_mean_tpot_ms, rel=0.1)
    assert scraped.mean_itl_ms > scraped.mean_tpot_ms  # chunks are merged
    half = scraped.ttft_ms.size // 2
    assert scraped.ttft_ms[half:].mean() > scraped.ttft_ms[:half].mean()


def test_a_request_costs_its_time(fleet: Workload, profile: Profile) -> None:
    """Work per request shifts the TTFT by at least itself."""
    quiet = simulate(fleet, profile, max_loras=64, duration_s=300)
    spec = replace(profile.frontend, request_ms=6.0)
    slow = simulate(fleet, replace(profile, frontend=spec), max_loras=64, duration_s=300)
    assert slow.median_ttft_ms >= quiet.median_ttft_ms + 5.0


def test_streaming_delays_first_tokens_by_all_outputs_of_their_step(fleet: Workload, profile: Profile) -> None:
    """A first token is the last of its step to be streamed; time between tokens does not change."""
    quiet = simulate(fleet, profile, max_loras=64, duration_s=600)
    spec = replace(profile.frontend, output_ms=0.1)
    busy = simulate(fleet, replace(profile, frontend=spec), max_loras=64, duration_s=600)
    delay_ms = busy.median_ttft_ms - quiet.median_ttft_ms
    assert delay_ms == pytest.approx(0.1 * quiet.mean_running, rel=0.6)
    assert delay_ms > 0.1 * quiet.mean_running
    assert busy.mean_tpot_ms == pytest.approx(quiet.mean_tpot_ms, rel=0.01)


def test_first_uses_follow_each_other(fleet: Workload, profile: Profile) -> None:
    """The first requests of many adapters wait for each other's first use; later ones don't."""
    spec = replace(profile.frontend, first_use_ms=400.0)
    sim = simulate(fleet, replace(profile, frontend=spec), max_loras=64, duration_s=600)
    assert sim.ttft_ms.max() > 2000.0
    assert sim.ttft_ms[sim.ttft_ms.size // 2 :].max() < 1000.0


@pytest.mark.parametrize(("places", "loads"), [(2, 12), (3, 3)])
def test_tokenizers_without_a_place_are_loaded_again(profile: Profile, places: int, loads: int) -> None:
    """The API server keeps tokenizers of as many adapters as `max_num_seqs`, and replaces the least recently used."""
    trace = RequestTrace(np.arange(12) * 10.0, np.arange(12) % 3, np.full(12, 30), np.full(12, 5))
    fleet = Workload([Adapter(f"a{i}", 8, 0.1) for i in range(3)], arrivals=Arrivals("trace", trace=trace))
    engine, spec = replace(profile.engine, max_num_seqs=places), replace(profile.frontend, first_use_ms=900.0)
    sim = simulate(fleet, replace(profile, engine=engine, frontend=spec), max_loras=2, duration_s=130.0)
    assert int((sim.ttft_ms > 900.0).sum()) == loads


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("version", "labels"), [("0.16.0", 1), ("0.32.0", 2)])
@pytest.mark.parametrize(
    ("times", "adapters", "outputs", "names"),
    [
        ([0, 2, 4, 6, 8, 10], [0, 1, 2, 0, 2, 1], [20] * 6, 1 + 1 + 1),  # each alone: {0}, {1}, {2}
        ([0, 0, 0], [0, 1, 2], [10, 20, 30], 3 + 2 + 1),  # prompts of one step: {0, 1, 2}, {1, 2}, {2}
    ],
)
def test_sets_of_adapters_are_named_by_hand(
    profile: Profile, times: list[int], adapters: list[int], outputs: list[int], names: int, version: str,
    labels: int, ahead: bool,
) -> None:  # fmt: skip
    """Each set is one series, whether steps are scheduled ahead or not; later versions name it in two labels."""
    n = len(times)
    trace = RequestTrace(np.array(times, float), np.array(adapters), np.full(n, 30), np.array(outputs))
    fleet = Workload([Adapter(f"a{i}", 8, 0.2) for i in range(3)], arrivals=Arrivals("trace", trace=trace))
    server = replace(profile, engine=replace(profile.engine, version=version, async_scheduling=ahead))
    sim = simulate(fleet, server, max_loras=3, duration_s=12.0, scrape_interval_s=1.0)
    assert (sim.metric_series, sim.metric_names) == (3, names * labels)


@njit
def hash_of_list(adapters: Record) -> int:
    """The kernel, called as kernels call it."""
    return frontend.hash_of_list(adapters)


def test_a_list_of_adapters_has_a_hash_that_is_none() -> None:
    """0 marks a list that has no hash yet: no list has it, not even one whose words give 0."""
    adapters = np.zeros(2, dtype=ADAPTER)
    adapters["named"]["after"][0] = 1
    assert hash_of_list(adapters) != 0
    adapters["words"][1] = 12
    assert hash_of_list(adapters) == 12
