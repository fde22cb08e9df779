"""What requests share is measured so that a fleet drawn from it shares as much."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packer.adapter import Adapter
from packer.blocks import Blocks
from packer.io.profiles import load_profile
from packer.lengths import Lengths
from packer.sessions import Sessions
from packer.traces import prefixes
from packer.traces.assign import assign_adapters
from packer.traces.measure import measure_workload
from packer.traces.prefixes import common_groups, conversations, with_hit_rate
from packer.traces.read import read_trace
from packer.traces.trace import Trace
from packer.twin.arrivals import draw_requests
from packer.twin.simulate import simulate
from packer.workload import Workload

FLEET = Workload(
    [Adapter(f"a{i}", 8, 0.3, shared_prefix_tokens=96) for i in range(8)],
    sessions=Sessions(turns=4, think_s=20, turn_tokens=60),
)


def _drawn(fleet: Workload, duration_s: float) -> Trace:
    """A trace of what the fleet sends."""
    sent = draw_requests(fleet, duration_s, 0)
    return Trace(
        sent.time_s - sent.time_s[0], sent.input_tokens, sent.output_tokens, sent.adapter, fleet.names,
        tuple(fleet.ranks.tolist()), blocks=sent.blocks, sessions=sent.sessions,
    )  # fmt: skip


def _slow_hits(trace: Trace) -> list[int]:
    """Tokens of each request that an earlier one of its adapter has, too, by looking at all blocks one by one."""
    assert trace.blocks is not None
    assert trace.adapter is not None
    known: set[tuple[int, int]] = set()
    hits = []
    for r in range(len(trace)):
        ids = trace.blocks.ids[trace.blocks.starts[r] : trace.blocks.starts[r + 1]].tolist()
        own = [(int(trace.adapter[r]), each) for each in ids]
        met = next((k for k, each in enumerate(own) if each not in known), len(own))
        hits.append(min(met * trace.blocks.tokens, int(trace.input_tokens[r]) - 1))
        known.update(own)
    return hits


@pytest.mark.parametrize("known", ["blocks", "sessions"])
def test_sessions_are_measured(known: str) -> None:
    """Turns, think time and what users add come back from blocks alone, and from ids of sessions alone."""
    trace = _drawn(FLEET, 20_000.0)
    trace = replace(trace, **{"sessions" if known == "blocks" else "blocks": None})
    found = measure_workload(trace)
    assert found.arrivals.kind == "poisson"
    assert found.offered_tok_s == pytest.approx(
        (trace.input_tokens.sum() + trace.output_tokens.sum()) / trace.span_s, rel=1e-3
    )
    for own in found.sessions_by_adapter:
        assert own is not None
        assert own.turns == pytest.approx(4.0, rel=0.08)
        assert own.think_s == pytest.approx(20.0, rel=0.08)
        assert own.turn_tokens == pytest.approx(60.0, rel=0.35)
    assert set(found.shared_prefix_tokens.tolist()) == ({96} if known == "blocks" else {0})


def test_conversations_are_sought_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bursts are measured on the first turns that sessions are measured with: all blocks are compared one time."""
    trace, sought = replace(_drawn(FLEET, 200.0), sessions=None), []
    monkeypatch.setattr(prefixes, "conversations", lambda each: sought.append(each) or conversations(each))
    measure_workload(trace)
    assert len(sought) == 1


def test_hits_and_conversations_are_those_of_every_block() -> None:
    """Hits equal those of a slow search; sessions found from blocks never join two that were drawn apart."""
    trace = _drawn(FLEET, 600.0)
    session, hits = conversations(trace)
    assert hits.tolist() == _slow_hits(trace)
    assert trace.sessions is not None
    for number in np.unique(session).tolist():
        assert len(set(trace.sessions[session == number].tolist())) == 1
    assert len(np.unique(session)) < 1.15 * len(np.unique(trace.sessions))


def test_a_conversation_stays_with_one_adapter(tmp_path: Path) -> None:
    """Requests that begin alike beyond what most share are given to one adapter; others are drawn one by one."""
    starts = [[1], [1, 2], [1, 3], [1, 2, 4], [1, 3, 5], [9], [9, 10], [1]]
    rows = [
        {"timestamp": 1000 * k, "input_length": 512 * len(ids), "output_length": 5, "hash_ids": ids}
        for k, ids in enumerate(starts * 40)
    ]
    for k, row in enumerate(rows):  # each repetition has conversations of its own
        row["hash_ids"] = [i if i == 1 else 100 * (k // len(starts)) + i for i in row["hash_ids"]]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    trace = assign_adapters(read_trace(path), 30, seed=1)
    assert trace.adapter is not None
    for k in range(0, len(rows), len(starts)):
        assert trace.adapter[k + 1] == trace.adapter[k + 3]
        assert trace.adapter[k + 2] == trace.adapter[k + 4]
        assert trace.adapter[k + 5] == trace.adapter[k + 6]
    assert len(np.unique(trace.adapter)) > 5


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=1, max_size=12))
def test_groups_share_their_first_block_beyond_the_common_ones(paths: list[list[int]]) -> None:
    """Two requests are of one group if and only if they have the same block behind what most of all begin with."""
    number: dict[tuple[int, ...], int] = {}
    chains = [[number.setdefault(tuple(path[: k + 1]), len(number)) for k in range(len(path))] for path in paths]
    starts = np.cumsum([0, *map(len, chains)])
    blocks = Blocks(starts, np.array([i for chain in chains for i in chain], dtype=np.int64), 16)
    common: list[int] = []
    while True:
        depth = len(common)
        following = [chain[depth] for chain in chains if chain[:depth] == common and len(chain) > depth]
        best = max(following, key=following.count, default=None)
        if best is None or 2 * following.count(best) <= len(chains):
            break
        common.append(best)
    groups = common_groups(blocks).tolist()

    def beyond(chain: list[int]) -> int | None:
        k = next((k for k, (one, other) in enumerate(zip(chain, common, strict=False)) if one != other), None)
        k = min(len(chain), len(common)) if k is None else k
        return chain[k] if k < len(chain) else None

    for i, first in enumerate(chains):
        for j, second in enumerate(chains[:i]):
            alike = beyond(first) is not None and beyond(first) == beyond(second)
            assert (groups[i] == groups[j]) == alike


@pytest.mark.parametrize("least", [0, 1])
def test_cached_tokens_of_a_log_become_a_prefix(tmp_path: Path, least: int) -> None:
    """A log that counts cached tokens gives each adapter the prefix that hits as many. vLLM does not log a 0."""
    rng = np.random.default_rng(0)
    lines = []
    for k in range(3000):
        prompt, name = int(rng.gamma(4.0, 75.0)) + 1, f"a{k % 2}"
        cached = min(112 if k % 2 else 0, prompt - 1) // 16 * 16
        lines.append({"time": 1.7e9 + k, "model": name, "prompt_tokens": prompt, "completion_tokens": 20})
        usage = {"prompt_tokens_details": {"cached_tokens": cached} if cached >= least else None}
        lines[-1] |= {"usage": usage} if k % 3 else {"metadata": {"usage_object": usage}}  # as LiteLLM logs it
    path = tmp_path / "access.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    found = measure_workload(replace(read_trace(path), ranks=(8, 8)))
    assert found.shared_prefix_tokens.tolist() == [0, 112]


@pytest.mark.parametrize("hit_rate", [0.0, 0.1, 0.3, 0.5, 0.8])
def test_a_simulated_fleet_hits_what_the_metrics_say(hit_rate: float) -> None:
    """Without anything but hits / queries, the simulated hit rate is the measured one within a point."""
    fleet = Workload([Adapter(f"a{i}", 8, 0.3 + 0.1 * i) for i in range(8)])
    profile = load_profile("h100-64gb/llama-3.1-8b-instruct")
    profile = replace(profile, engine=replace(profile.engine, version="0.32.0"))
    sim = simulate(with_hit_rate(fleet, hit_rate), profile, max_loras=8)
    assert sim.prefix_hit_rate == pytest.approx(hit_rate, abs=0.01)


def test_whole_blocks_are_shared_among_adapters_so_that_the_sum_is_right() -> None:
    """With prompts of a few blocks adapters differ by a block, so that all together hit what was measured."""
    fleet = Workload([Adapter(f"a{i}", 8, 1.0, Lengths.constant(100)) for i in range(10)])
    found = with_hit_rate(fleet, 0.4).shared_prefix_tokens
    assert found.sum() / 1000 == pytest.approx(0.4, abs=0.01)
    assert set(found.tolist()) == {32, 48}
