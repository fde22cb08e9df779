"""The front end delays what the client sees, not what the engine does beyond the delay of arrivals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from packer.adapter import Adapter
from packer.io.profiles import load_profile
from packer.lengths import Lengths
from packer.profile import FrontEndSpec, Profile
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


def test_streaming_delays_first_tokens_by_all_outputs_of_their_step(
    fleet: Workload, profile: Profile
) -> None:
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
