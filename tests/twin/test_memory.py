"""KV cache capacity: exact where measured, monotone, and the unified policy beside the reserved one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packer.adapter import Adapter
from packer.arrival import Arrivals
from packer.cluster import Cluster, ServerKind
from packer.fit.estimate import estimate_profile
from packer.io.profiles import load_profile
from packer.job import FineTuning
from packer.kv_shape import KvShape
from packer.lengths import Lengths
from packer.profile import Profile
from packer.sessions import Sessions
from packer.settings import MAX_LORAS
from packer.twin.arrivals import draw_requests
from packer.twin.cluster.simulate import simulate_cluster
from packer.twin.memory import held, policy
from packer.twin.memory.policy import (
    analytic_kv_tokens,
    kv_cache_tokens,
    kv_cache_tokens_many,
    memory_error,
    memory_policy,
)
from packer.twin.memory.starts import what_starts
from packer.twin.override import with_engine
from packer.twin.simulate import simulate
from packer.workload import Workload

SHIPPED = ("h100-64gb/llama-3.1-8b-instruct", "h100-64gb/qwen-2.5-7b-instruct")


@pytest.mark.parametrize("name", SHIPPED)
def test_measured_points_are_exact(name: str) -> None:
    """Where a capacity was measured, the model says it to the token."""
    profile = load_profile(name)
    assert len(profile.memory.measured) > 20
    for max_loras, rank, tokens in profile.memory.measured:
        assert kv_cache_tokens(profile, profile.settings(max_loras, rank)) == tokens


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("rank", [8, 16, 32, 64])
def test_more_slots_leave_less(name: str, rank: int) -> None:
    """Capacity falls as slots are added, between measured points and beyond them."""
    tokens = kv_cache_tokens_many(load_profile(name), np.arange(1, 500), rank)
    assert np.all(np.diff(tokens) <= 0)


def test_line_by_hand(make_profile: Callable[..., Profile]) -> None:
    """Budget less slots × (bytes per slot + rank × bytes per rank), in whole tokens."""
    profile = make_profile(kv_budget_bytes=10_000.5, slot_bytes=100.0, slot_bytes_per_rank=10.0)
    assert kv_cache_tokens(profile, profile.settings(5, 16)) == 10_000 - 5 * (100 + 160)
    assert kv_cache_tokens(profile, profile.settings(100, 16)) == 10_000 - 26_000


@pytest.mark.parametrize(("ranks", "slots"), [((8, 8), 5), ((8, 0), 6), ((0, 0), 0)])
def test_sglang_has_a_slot_for_the_base_model(
    ranks: tuple[int, ...], slots: int, make_profile: Callable[..., Profile]
) -> None:
    """Requests without an adapter take one of SGLang's buffers, which exports add: the twin's server has it, too."""
    profile = make_profile(kv_budget_bytes=10_000.5, slot_bytes=100.0, slot_bytes_per_rank=10.0)
    fleet = Workload([Adapter(f"a{k}", rank, 0.1) for k, rank in enumerate(ranks)])
    for name, held_by in (("sglang", slots), ("vllm", min(slots, 5))):
        other = replace(profile, engine=replace(profile.engine, name=name))
        tokens = simulate(fleet, other, max_loras=5, max_lora_rank=16, duration_s=1.0).kv_cache_tokens
        assert tokens == 10_000 - held_by * (100 + 160)
        tight = replace(other, memory=replace(other.memory, min_kv_tokens=10_000 - 5 * 260))
        run = simulate(fleet, tight, max_loras=5, max_lora_rank=16, duration_s=1.0)
        ways = "max_loras 4 at rank 16" if held_by == 6 else None
        assert (run.status, what_starts(tight, run.settings, fleet)) == (
            "memory_error" if ways else "ok",
            ways,
        )


def test_sglangs_further_slot_is_within_the_most_of_settings(make_profile: Callable[..., Profile]) -> None:
    """At the most slots that settings have, there is no further one."""
    profile = make_profile()
    other = replace(profile, engine=replace(profile.engine, name="sglang"))
    fleet = Workload([Adapter("a", 8, 0.1), Adapter("base", 0, 0.1)])
    assert policy.held(other, other.settings(MAX_LORAS, 8), fleet).max_loras == MAX_LORAS


@given(st.integers(1, 200), st.integers(0, 50_000))
@settings(deadline=None)
def test_residuals_are_interpolated(loras: int, shift: int) -> None:
    """Between two measured points of a rank the residual is a straight line, and constant beyond them."""
    profile = load_profile(SHIPPED[0])
    points = ((10, 16, 300_000 + shift), (110, 16, 200_000))
    profile = replace(profile, memory=replace(profile.memory, measured=points))
    line = analytic_kv_tokens(profile, np.array([10, loras, 110]), 16)
    ends = 300_000 + shift - line[0], 200_000 - line[2]
    expected = line[1] + np.interp(loras, [10, 110], ends)
    assert kv_cache_tokens(profile, profile.settings(loras, 16)) == pytest.approx(expected, abs=1.001)
    assert kv_cache_tokens(profile, profile.settings(loras, 32)) == int(
        np.floor(analytic_kv_tokens(profile, loras, 32))
    )


def test_unified_memory_reserves_nothing(make_profile: Callable[..., Profile]) -> None:
    """Under the unified policy slots cost nothing until adapters move in."""
    profile = make_profile(policy="unified", kv_budget_bytes=5000.0, slot_bytes=100.0, slot_bytes_per_rank=10.0)
    assert (
        kv_cache_tokens(profile, profile.settings(1, 8)) == kv_cache_tokens(profile, profile.settings(400, 512)) == 5000
    )
    assert memory_policy(profile).reserved_bytes(profile, profile.settings(400, 512)) == 0.0


def test_memory_error_says_why(make_profile: Callable[..., Profile]) -> None:
    """A server whose slots leave nothing, or too little, does not start, and the reason names the slots."""
    profile = make_profile(kv_budget_bytes=10_000.0, slot_bytes_per_rank=100.0, min_kv_tokens=2000)
    assert memory_error(profile, profile.settings(10, 8)) is None
    assert "11 slots of rank 8 leave 1200 KV tokens" in str(memory_error(profile, profile.settings(11, 8)))
    assert "13 slots of rank 8 leave no memory" in str(memory_error(profile, profile.settings(13, 8)))


def test_what_would_start_starts() -> None:
    """The settings that are proposed start, and one slot more than proposed does not."""
    profile = load_profile(SHIPPED[0])
    assert what_starts(profile, profile.settings(8, 8)) is None
    words = what_starts(profile, profile.settings(384, 16))
    assert words is not None
    slots, context = (int(text.split()[1]) for text in (words.split(" or ")[0], words.split(" or ")[1]))
    assert memory_error(profile, profile.settings(slots, 16)) is None
    assert memory_error(profile, profile.settings(slots + 1, 16)) is not None
    shorter = with_engine(profile, max_model_len=context)
    assert memory_error(shorter, shorter.settings(384, 16)) is None
    tiny = replace(profile, memory=replace(profile.memory, kv_budget_bytes=1e6, measured=()))
    assert "more memory" in str(what_starts(tiny, tiny.settings(8, 8)))
    l4 = estimate_profile("Qwen/Qwen3-8B", "l4")  # neither fewer slots nor a shorter context suffice alone
    both = str(what_starts(l4, l4.settings(60, 64)))
    assert both.startswith("max_loras 1 with --max-model-len")
    shorter = with_engine(l4, max_model_len=int(both.split()[-1]))
    assert memory_error(shorter, shorter.settings(1, 64)) is None


def test_capacity_is_in_tokens_of_the_requests() -> None:
    """Where a request holds less for tokens beyond a window, or a state beside them, the same memory has room for more,
    or for fewer of its tokens; a cluster of one server has the same capacity as the server."""
    base = load_profile(SHIPPED[0])
    settings, room = base.settings(8, 16), kv_cache_tokens(base, base.settings(8, 16))
    lengths = Lengths.constant(3000), Lengths.constant(200)
    fleet = Workload([Adapter("a", 16, 0.2), Adapter("b", 8, 0.1)], *lengths)
    for shape, ratio in ((KvShape(1000, 0.75), 1000 + 0.25 * 2100), (KvShape(0, 0.0, 620.0), 3100 + 620)):
        profile = replace(base, model=replace(base.model, kv_shape=shape))
        expected = int(room / (ratio / 3100))
        assert kv_cache_tokens(profile, settings, fleet) == pytest.approx(expected, rel=0.001)
        assert kv_cache_tokens(profile, settings) == room
        server = simulate(fleet, profile, max_loras=8, duration_s=60.0)
        assert server.kv_cache_tokens == kv_cache_tokens(profile, server.settings, fleet)
        cluster = Cluster((ServerKind("one", profile, 8),), ("one",))
        assert simulate_cluster(fleet, cluster, duration_s=60.0).kv_cache_tokens == server.kv_cache_tokens
        sent = draw_requests(fleet, 600.0, seed=1)
        trace = replace(fleet, arrivals=Arrivals("trace", trace=sent))
        assert kv_cache_tokens(profile, settings, trace) == kv_cache_tokens(profile, settings, fleet)


def test_what_training_and_adapters_take_has_the_same_bytes_in_any_tokens() -> None:
    """Training and adapters in a pool take the same share of the memory whatever the layers keep of the requests."""
    base = load_profile(SHIPPED[0])
    base = replace(base, memory=replace(base.memory, policy="unified"))
    fleet = Workload([Adapter("a", 64, 0.2), Adapter("b", 8, 0.1)], Lengths.constant(3000), Lengths.constant(200))
    trains, shares = replace(fleet, fine_tuning=FineTuning(policy="temporal")), []
    for shape in (None, KvShape(1000, 0.75), KvShape(0, 0.0, 620.0)):
        profile = replace(base, model=replace(base.model, kv_shape=shape))
        free, room = (simulate(each, profile, max_loras=2, duration_s=1.0).kv_cache_tokens for each in (fleet, trains))
        blocks = memory_policy(profile).adapter_blocks(profile, fleet)
        shares.append([room / free, *blocks * profile.engine.block_size / free])
    assert np.array(shares) == pytest.approx(np.array(shares[:1] * 3), rel=0.03)


def test_sessions_with_the_same_lengths_are_integrated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long lists of measured lengths are scaled and hashed once for all adapters that share them."""
    calls = []
    monkeypatch.setattr(held, "_drawn", lambda *given: calls.append(given) or np.ones(2))
    adapters = [Adapter(f"a{k}", 16, 1.0) for k in range(9)]
    held.share_held(Workload(adapters, sessions=Sessions(turns=4.0)), KvShape(1000, 0.75))
    assert len(calls) == 1


def test_sessions_and_own_lengths_count() -> None:
    """Each adapter counts with its own lengths and tokens in time; a session's prompts have its mean length."""
    shape, base = KvShape(1000, 0.75), load_profile(SHIPPED[0])
    profile = replace(base, model=replace(base.model, kv_shape=shape))
    settings, out = profile.settings(8, 16), Lengths.constant(10)
    short, long = (
        Adapter("a", 16, 1.0, Lengths.constant(100), out),
        Adapter("b", 16, 1.0, Lengths.constant(9000), out),
    )
    kept = 105 + 1000 + 0.25 * 8005
    both = kv_cache_tokens(profile, settings, Workload([short, long]))
    assert both == pytest.approx(kv_cache_tokens(profile, settings) / (kept / 9110), rel=0.001)
    talks = Workload([replace(short, sessions=Sessions(turns=20.0))])
    mean = float(talks.mean_input_tokens[0]) + 5.0
    assert mean > 1000
    ratio = (1000 + 0.25 * (mean - 1000)) / mean
    found = kv_cache_tokens(profile, settings) / kv_cache_tokens(profile, settings, talks)
    assert found == pytest.approx(ratio, rel=0.01)
