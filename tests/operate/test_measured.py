"""What requests are like, learnt from what servers measured."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

import packer
from packer.live.traffic import Sampled
from packer.operate.capacity import cache_lost, cached_tokens, server_kinds
from packer.operate.measured import Requests
from packer.sessions import Sessions
from packer.solvers.nearest import Nearest
from packer.twin.simulate import simulate

PROMPTS, OUTPUTS = packer.Lengths.gamma(200.0, 1.0), packer.Lengths.gamma(100.0, 0.5)
FLEET = packer.Workload([packer.Adapter(f"a{k}", 8, 0.5) for k in range(4)], PROMPTS, OUTPUTS, 0.0)
LOADS = {0: {0: 150.0, 1: 150.0}, 1: {2: 150.0, 3: 150.0}}
PROFILE = packer.load_profile("h100-64gb/llama-3.1-8b-instruct")
CACHING = replace(PROFILE, engine=replace(PROFILE.engine, version="0.32.0"))


def known(fleet: packer.Workload = FLEET) -> Requests:
    """What is known after a look at servers with these adapters."""
    made = Requests(fleet)
    assert made.learn(0.0, LOADS, {}, lambda _s: 0.0) == {}
    return made


def test_lengths_that_differ_by_more_than_their_error_are_taken_over() -> None:
    """The adapters of the server that measured them get its factor, in both directions, and the others keep theirs."""
    made = known()
    said = made.learn(60.0, LOADS, {0: Sampled(2000, 400.0, 50.0), 1: Sampled(2000, 203.0, 99.0)}, lambda _s: 0.0)
    assert list(said) == [0]
    assert "prompts have 400 tokens, 200 were expected, ± 2.2%" in said[0][0]
    assert made.fleet.mean_input_tokens == pytest.approx([400.0, 400.0, 200.0, 200.0], rel=0.01)
    assert made.fleet.mean_output_tokens == pytest.approx([50.0, 50.0, 100.0, 100.0], rel=0.01)
    assert made.learn(120.0, LOADS, {0: Sampled(2000, 400.0, 50.0)}, lambda _s: 0.0) == {}


def test_few_requests_and_small_differences_change_nothing() -> None:
    """Fewer requests have a larger error, and below 5 % the twin's own step is larger."""
    made = known()
    for sample in (Sampled(49, 900.0, 100.0), Sampled(60, 300.0, 100.0), Sampled(1e6, 209.0, 100.0)):
        assert made.learn(60.0, LOADS, {0: sample}, lambda _s: 0.0) == {}, sample
    assert made.learn(60.0, LOADS, {0: Sampled(1e6, 212.0, 100.0)}, lambda _s: 0.0)


def test_chance_is_not_learnt() -> None:
    """Means of requests that are drawn as planned are taken for others twice in a thousand looks at most."""
    made, rng, learnt = known(), np.random.default_rng(0), 0
    for look in range(1000):
        n = int(rng.integers(50, 3000))
        sample = Sampled(n, PROMPTS.sample(rng, n).mean(), OUTPUTS.sample(rng, n).mean())
        learnt += len(made.learn(60.0 * look, LOADS, {0: sample}, lambda _s: 0.0))
    assert learnt <= 2


def test_adapters_that_are_told_apart_by_few_looks_have_a_larger_error() -> None:
    """Where adapters have unlike lengths, their shares of the requests are part of the error."""
    adapters = [replace(FLEET.adapters[0], input_tokens=PROMPTS.scaled(1000.0)), *FLEET.adapters[1:]]
    made = known(replace(FLEET, adapters=tuple(adapters)))
    sure, _ = made.expected(LOADS[0], "input_tokens", Sampled(2000, 1.0, 1.0)), None
    unsure = made.expected(LOADS[0], "input_tokens", Sampled(2000, 1.0, 1.0, looks=10.0))
    assert sure[0] == unsure[0]
    assert unsure[1] > 3.0 * sure[1]


def test_a_sample_of_other_adapters_does_not_count() -> None:
    """What a server measured before its adapters changed says nothing of those that it has now."""
    made = known()
    moved = {0: {0: 150.0}, 1: {1: 150.0, 2: 150.0, 3: 150.0}}
    sample = {0: Sampled(2000, 400.0, 100.0)}
    assert made.learn(60.0, moved, sample, lambda _s: 0.0) == {}
    assert made.same_since_s(0) == 60.0
    assert list(made.learn(120.0, moved, sample, lambda _s: 0.0)) == [0]


def test_a_hit_rate_becomes_prefixes_that_make_it() -> None:
    """With the prefixes that are learnt the twin finds the measured share of prompts in its cache."""
    made = known()
    said = made.learn(60.0, LOADS, {0: Sampled(5000, 200.0, 100.0, 0.4)}, lambda _s: 0.0)
    assert "40.0% of the prompts' tokens are in the prefix cache, 0.0% were expected" in said[0][0]
    run = simulate(made.fleet.subset([0, 1]), CACHING, max_loras=4, max_lora_rank=8, duration_s=2000.0, seed=1)
    assert run.prefix_hit_rate == pytest.approx(0.4, abs=0.03)
    assert made.learn(120.0, LOADS, {0: Sampled(5000, 200.0, 100.0, 0.42)}, lambda _s: 0.0) == {}
    assert known().learn(60.0, LOADS, {0: Sampled(5000, 200.0, 100.0, 0.4)}, lambda _s: None) == {}


def test_a_log_gives_each_adapter_its_own_lengths() -> None:
    """An adapter whose requests name it gets the lengths measured of it, with enough requests."""
    adapters = [packer.Adapter(name, 8, rate, PROMPTS.scaled(500.0)) for name, rate in (("a0", 1.0), ("a1", 0.01))]
    made = known()
    said = made.meet(packer.Workload(adapters, PROMPTS, OUTPUTS, 0.0), 3600.0)
    assert said == "other lengths than expected of 1 adapter: a0"
    assert made.fleet.mean_input_tokens == pytest.approx([500.0, 200.0, 200.0, 200.0], rel=0.01)
    assert made.fleet.rates.tolist() == [0.5] * 4
    assert made.meet(packer.Workload(adapters, PROMPTS, OUTPUTS, 0.0), 3600.0) == ""


def test_what_was_learnt_stays_for_another_fleet() -> None:
    """Adapters that are planned as before keep their lengths; one that is planned anew has the planned ones."""
    made = known()
    made.learn(60.0, LOADS, {0: Sampled(2000, 400.0, 100.0)}, lambda _s: 0.0)
    now = replace(FLEET, adapters=(FLEET.adapters[0], replace(FLEET.adapters[1], input_tokens=PROMPTS.scaled(50.0))))
    assert made.carried(FLEET, now).fleet.mean_input_tokens == pytest.approx([400.0, 50.0], rel=0.01)


def test_cached_tokens_are_those_of_the_sessions_between_turns() -> None:
    """The formula is the mean of a slow count of sessions: those that wait for their next turn, and what they said."""
    turns, think_s = 5.0, 60.0
    own = Sessions(turns, think_s, turn_tokens=30.0)
    fleet = packer.Workload(
        [packer.Adapter("a", 8, 2.0, shared_prefix_tokens=64, sessions=own)],
        packer.Lengths.constant(200.0), packer.Lengths.constant(100.0), 0.0,
    )  # fmt: skip
    rng, span_s, held = np.random.default_rng(3), 20_000.0, 0.0
    for _ in range(round(2.0 / turns * span_s)):
        for turn in range(1, int(rng.geometric(1.0 / turns))):
            held += (200.0 + turn * 100.0 + (turn - 1) * 30.0) * own.gap_s(100.0)
    load = fleet.offered_tok_s_by_adapter
    assert cached_tokens(fleet, load) == pytest.approx([64.0 + held / span_s], rel=0.05)


def test_a_cache_is_lost_by_the_share_that_moves() -> None:
    """Half of an adapter's requests lose half of what its cache holds, at most a KV cache; without a cache nothing."""
    fleet = replace(FLEET, adapters=tuple(replace(a, shared_prefix_tokens=128) for a in FLEET.adapters))
    load = fleet.offered_tok_s_by_adapter
    plan = packer.solve(fleet, PROFILE, with_headroom=False)
    (old,) = server_kinds(plan, 1)
    kind = replace(old, profile=CACHING)
    near = Nearest(load, [{0: 1.0, 1: 1.0}, {2: 1.0, 3: 1.0}], [0, 1])
    assert cache_lost(fleet, load, near, [kind, kind]) == 0.0
    near.held[0][0], near.held[1][0] = 0.5, 0.5
    assert cache_lost(fleet, load, near, [kind, kind]) == pytest.approx(64.0)
    assert cache_lost(fleet, load, near, [old, old]) == 0.0
    assert not math.isnan(cache_lost(FLEET, load, near, [kind, kind]))
