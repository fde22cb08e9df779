"""A profile's engine version decides by which of vLLM's rules its server is simulated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from packer.adapter import Adapter
from packer.lengths import Lengths
from packer.profile import FrontEndSpec, LoadingSpec, Profile
from packer.twin.engine_rules import EngineRules, rules_of
from packer.twin.simulate import simulate
from packer.workload import Workload


@pytest.mark.parametrize(
    ("version", "prefills_first", "lists", "tokenizers"),
    [
        ("0.5.0", True, False, True),
        ("v0.7.3", True, False, True),
        ("0.8.5", False, False, True),
        ("0.8.5.post1", False, False, True),
        ("0.10.2", False, False, True),
        ("0.11.0", False, False, False),
        ("0.32.0", False, True, False),
        ("1.0", False, True, False),
        ("0", False, False, True),
        ("nightly", False, False, True),
    ],
)
def test_rules_follow_the_version(
    version: str, prefills_first: bool, lists: bool, tokenizers: bool, make_profile: Callable[..., Profile]
) -> None:
    """Versions between two whose source was read follow the older one; what is no version follows 0.8.5."""
    engine = replace(make_profile().engine, version=version)
    assert rules_of(engine) == EngineRules(prefills_first, lists, tokenizers)
    assert rules_of(replace(engine, name="other")) == EngineRules(False, False, True)


def _simulated(profile: Profile, version: str, *, adapters: int, slots: int) -> tuple[float, int]:
    fleet = Workload(
        [Adapter(f"a{i}", 8, 8.0 / adapters) for i in range(adapters)],
        Lengths.gamma(60, 1.0),
        Lengths.gamma(60, 1.0),
    )
    server = replace(profile, engine=replace(profile.engine, version=version))
    sim = simulate(fleet, server, max_loras=slots, duration_s=300.0, scrape_interval_s=60.0)
    return sim.loads_per_request, sim.metric_series


def test_prefills_of_their_own_load_more(make_profile: Callable[..., Profile]) -> None:
    """Where those that join are touched before the batch, a new adapter evicts the first of the walk, not the next."""
    profile = make_profile(loading=LoadingSpec(host_base_ms=2.0))
    old, _ = _simulated(profile, "0.5.0", adapters=48, slots=6)
    new, _ = _simulated(profile, "0.8.5", adapters=48, slots=6)
    assert old > 1.3 * new > 1.0


def test_lists_make_more_series_than_sets(make_profile: Callable[..., Profile]) -> None:
    """A few adapters have few sets, but many orders: series in 0.32 are not bounded by the sets."""
    _, sets = _simulated(make_profile(), "0.8.5", adapters=4, slots=4)
    _, lists = _simulated(make_profile(), "0.32.0", adapters=4, slots=4)
    assert sets <= 16 * 16
    assert 30 < lists <= 64  # ordered lists of 1 to 4 of 4 adapters


def test_no_first_use_where_adapters_share_a_tokenizer(make_profile: Callable[..., Profile]) -> None:
    """The cost of an adapter's first request is paid up to vLLM 0.10, and not from 0.11 on."""
    fleet = Workload([Adapter("a", 8, 0.2)], Lengths.constant(50), Lengths.constant(20))
    profile = replace(make_profile(), frontend=FrontEndSpec(first_use_ms=5000.0))
    first_ms = [
        simulate(fleet, replace(profile, engine=replace(profile.engine, version=version)), max_loras=1, duration_s=60.0)
        .ttft_ms.max()
        for version in ("0.10.2", "0.11.0")
    ]  # fmt: skip
    assert first_ms[0] > 5000.0 > 20 * first_ms[1]
