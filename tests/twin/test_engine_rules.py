"""A profile's engine version decides by which of vLLM's rules its server is simulated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace

import pytest

from packer.adapter import Adapter
from packer.engine_spec import V1_RELEASE
from packer.errors import ValidationError
from packer.lengths import Lengths
from packer.profile import ONE_TOKENIZER, FrontEndSpec, LoadingSpec, Profile
from packer.twin.engine_rules import OLDEST, READ, RULES, followed, rules_of, server_defaults
from packer.twin.simulate import simulate
from packer.workload import Workload


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.5.0", "prefills_first tokenizer_per_adapter"),
        ("v0.7.3", "prefills_first tokenizer_per_adapter"),
        ("0.8.5", "tokenizer_per_adapter"),
        ("0.8.5.post1", "tokenizer_per_adapter"),
        ("0.10.2", "tokenizer_per_adapter prefix_caching skipped_reversed"),
        ("0.11.0", "graphs_without_lora prefix_caching skipped_reversed"),
        ("0.16.0", "graphs_without_lora prefix_caching async_scheduling"),
        ("0.20.2", "graphs_without_lora prefix_caching async_scheduling whole_sequence skipped_first"),
        (
            "0.24.0",
            "graphs_without_lora prefix_caching async_scheduling whole_sequence skipped_first unhashed_first",
        ),
        (
            "0.32.0",
            "graphs_without_lora prefix_caching async_scheduling whole_sequence unhashed_first series_of_lists",
        ),
        (
            "0.33.0",
            "graphs_without_lora prefix_caching async_scheduling whole_sequence unhashed_first series_of_lists "
            "slots_of_running passes_itself caches_verified hashes_ahead",
        ),
        ("0", "tokenizer_per_adapter"),
        ("nightly", "tokenizer_per_adapter"),
    ],
)
def test_rules_follow_the_version(version: str, expected: str, make_profile: Callable[..., Profile]) -> None:
    """Versions between two whose source was read follow the older one; what is no version follows 0.8.5."""
    engine = replace(make_profile().engine, version=version)
    held = {name for name, holds in asdict(rules_of(engine)).items() if holds}
    assert held == set(expected.split())
    other = asdict(rules_of(replace(engine, name="other")))
    assert {name for name, holds in other.items() if holds} == {"tokenizer_per_adapter"}


def test_settings_of_a_profile_come_before_defaults(make_profile: Callable[..., Profile]) -> None:
    """A profile that says whether prefixes are cached and steps scheduled ahead is not overruled by its version."""
    engine = make_profile().engine
    for version, chosen in (("0.32.0", False), ("0.8.5", True)):
        rules = rules_of(replace(engine, version=version, prefix_caching=chosen, async_scheduling=chosen))
        assert (rules.prefix_caching, rules.async_scheduling) == (chosen, chosen)


@pytest.mark.parametrize("version", ["0.34.0", "1.0", "v2.1.3"])
def test_unknown_versions_are_refused(version: str, make_profile: Callable[..., Profile]) -> None:
    """A version beyond the newest whose source was read may have any rules: it is refused by its name."""
    profile = make_profile()
    profile = replace(profile, engine=replace(profile.engine, version=version))
    fleet = Workload([Adapter("a", 8, 0.2)], Lengths.constant(50), Lengths.constant(20))
    with pytest.raises(ValidationError, match=f"up to 0.33, .* got '{version}'"):
        simulate(fleet, profile, max_loras=1, duration_s=60.0)


def test_a_bfloat16_cache_is_asked_for_since_0_11(make_profile: Callable[..., Profile]) -> None:
    """Before, vLLM does not start with --kv-cache-dtype bfloat16, which exports would give it."""
    engine = replace(make_profile().engine, kv_cache_dtype="bfloat16")
    rules_of(replace(engine, version="0.11.0"))
    rules_of(replace(engine, name="sglang", version="0.5"))
    with pytest.raises(ValidationError, match=r"from 0\.11 on with kv_cache_dtype \"bfloat16\", got 'vllm 0\.10\.0'"):
        rules_of(replace(engine, version="0.10.0"))


@pytest.mark.parametrize(
    ("setting", "name", "version", "says"),
    [
        ("async_scheduling", "sglang", "0.5", "a server of vLLM with async_scheduling"),
        ("prefix_caching", "sglang", "0.5", "a server of vLLM with prefix_caching"),
    ],
)
def test_what_is_not_simulated_is_refused(
    setting: str, name: str, version: str, says: str, make_profile: Callable[..., Profile]
) -> None:
    """Other engines do not simulate a setting: it is refused, and off is what they do."""
    engine = replace(make_profile().engine, name=name, version=version)
    rules_of(replace(engine, **{setting: False}))
    with pytest.raises(ValidationError, match=f"Expected {says}, got '{name} {version}'"):
        rules_of(replace(engine, **{setting: True}))


def test_versions_between_two_say_which_they_follow(make_profile: Callable[..., Profile]) -> None:
    """A version that was not read follows the newest one before it, and says which."""
    engine = make_profile().engine
    assert followed(replace(engine, version="0.26.1")).endswith("follows the rules of 0.24, the newest before it")
    for version in ("banana", "33", "v1"):
        assert followed(replace(engine, version=version)).endswith("which is no version, follows the rules of 0.8")
    assert followed(replace(engine, version="0.32.0")) == followed(replace(engine, name="other")) == ""


def test_the_table_names_versions_that_were_read() -> None:
    """Each rule begins and ends with a version whose source was read, and says where it stands."""
    for rule in RULES:
        assert rule.since in (*READ, OLDEST, (0, 9))
        assert rule.until is None or rule.until in READ
        assert rule.where[0].isdigit()
        assert rule.says.endswith(".")
    ends = {rule.name: rule.until for rule in RULES}
    assert (ends["prefills_first"], ends["tokenizer_per_adapter"]) == (V1_RELEASE, ONE_TOKENIZER)


@pytest.mark.parametrize(
    ("version", "gpu", "gib", "expected"),
    [
        ((0, 8), "a100-80gb", 80, (8192, 1024)),
        ((0, 10), "A100-80GB", 80, (2048, 256)),
        ((0, 32), "h100-80gb", 79, (8192, 1024)),
        ((0, 24), "b200", 178, (8192, 1024)),
        ((0, 28), "b200", 178, (16384, 1024)),
        ((0, 33), "l40s", 44, (2048, 256)),
    ],
)
def test_servers_start_with_the_defaults_of_their_card(
    version: tuple[int, int], gpu: str, gib: float, expected: tuple[int, int]
) -> None:
    """Batched tokens and sequences of an API server depend on the card's memory, and on the version."""
    assert server_defaults(version, gib * 2**30, gpu) == expected


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
