"""The engine takes the decisions of vLLM's own scheduler, as recorded on random cases, and of one written after it."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from naive_prefix import NaiveScheduler, Request, Settings

from packer.adapter import Adapter
from packer.arrival import Arrivals, RequestTrace
from packer.blocks import Blocks
from packer.kv_shape import KvShape
from packer.profile import FrontEndSpec, LatencySpec, LoadingSpec, MemorySpec, Profile
from packer.speculation import SpeculationSpec
from packer.twin.engine import holding, pool, schedule
from packer.twin.run import Run
from packer.twin.simulate import simulate
from packer.workload import Workload

FILE = Path(__file__).parents[2] / "data" / "scheduler" / "vllm.json.gz"
WINDOWS, PREFILLS, PREFIXES = (FILE.with_name(f"{name}.json.gz") for name in ("windows", "prefills", "prefixes"))
CASES: list[dict[str, Any]] = json.loads(gzip.decompress(FILE.read_bytes()))
"""`Scheduler` and KV cache manager of vLLM without a model, with a simulated clock: first token and finish of each
request, tokens found in the KV cache at its first admission, and preemptions."""
RUN_S = 1e6


def _profile(case: dict[str, Any], base: Profile) -> Profile:
    engine, law = case["engine"], case["law"]
    settings = {key: engine[key] for key in ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "block_size")}
    coefficients = {
        "base_ms": law["base"],
        "per_decode_ms": law["token"],
        "per_prefill_token_ms": law["token"],
    }
    drafts = None
    if "method" in engine:
        drafts = SpeculationSpec(engine["method"], engine["num_speculative_tokens"], 0.5)
    return replace(
        base,
        engine=replace(
            base.engine,
            version=case["version"],
            prefix_caching=engine["prefix_caching"],
            async_scheduling=bool(engine.get("async_scheduling")),
            scheduling_policy=engine.get("scheduling_policy", "fcfs"),
            speculation=drafts,
            **settings,
        ),
        model=replace(base.model, kv_bytes_per_token=1024.0),
        memory=MemorySpec(engine["blocks"] * engine["block_size"] * 1024.0, 0.0, 0.0, 1),
        latency=LatencySpec("linear", {name: value * 1e3 for name, value in coefficients.items()}),
        loading=LoadingSpec(),
        frontend=FrontEndSpec(),
    )


def _run(case: dict[str, Any], base: Profile, kv_shape: KvShape | None = None) -> Run:
    adapter = np.unique(case["adapter"], return_inverse=True)[1].ravel().astype(np.int64)
    columns = (np.array(case[side], dtype=np.int64) for side in ("prompt", "output"))
    blocks = None
    if case["blocks"]:
        tokens = case.get("tokens", case["engine"]["block_size"])
        starts = np.concatenate([[0], np.cumsum([len(row) for row in case["blocks"]])])
        ids = np.array([i for row in case["blocks"] for i in row], dtype=np.int64)
        blocks = Blocks(starts.astype(np.int64), ids, tokens)
    priority = np.array(case["priority"], dtype=np.int64) if case.get("priority") else None
    trace = RequestTrace(np.array(case["time"]), adapter, *columns, blocks=blocks, end_s=RUN_S, priority=priority)
    chances = [case["acceptance"][a] for a in np.unique(case["adapter"])] if case.get("acceptance") else []
    adapters = [Adapter(f"a{i}", 8, 1.0) for i in range(int(adapter.max()) + 1)]
    for i, chance in enumerate(chances):
        k = case["engine"]["num_speculative_tokens"]
        adapters[i] = replace(adapters[i], acceptance=sum(chance ** (j + 1) for j in range(k)) / k)
    fleet = Workload(adapters, arrivals=Arrivals("trace", trace=trace))
    slots = case["engine"]["max_loras"]
    profile = _profile(case, base)
    profile = replace(profile, model=replace(profile.model, kv_shape=kv_shape))
    return simulate(fleet, profile, max_loras=slots, max_lora_rank=8, duration_s=RUN_S, timeline_bin_s=1e4)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_decisions_are_those_of_vllm(number: int, make_profile: Callable[..., Profile]) -> None:
    """Every first token and finish agrees to a microsecond, every hit and the number of preemptions exactly."""
    case = CASES[number]
    sim = _run(case, make_profile())
    np.testing.assert_allclose(sim.raw.first_s, case["first"], rtol=0.0, atol=1e-6)
    np.testing.assert_allclose(sim.raw.finish_s, case["finish"], rtol=0.0, atol=1e-6)
    if case["version"] in ("0.32.0", "0.33.0"):  # older ones do not say whom they preempted
        assert sim.preemptions == case["preemptions"]
    if case["engine"]["prefix_caching"]:
        assert sim.raw.found is not None
        assert sim.raw.found.tolist() == case["cached"]
        assert sim.cached_tokens == sum(case["cached"])
        assert sim.prefix_hit_rate == pytest.approx(sum(case["cached"]) / sum(case["prompt"]))


def test_layers_with_windows_are_near_vllm(make_profile: Callable[..., Profile]) -> None:
    """Where the KV cache is short, requests whose layers keep a window take as long as on vLLM's groups of layers,
    within 5 % in the middle case; as if all layers kept all tokens, four times as far from it."""
    cases = json.loads(gzip.decompress(WINDOWS.read_bytes()))
    assert all(case["preemptions"] > 0 for case in cases)
    near, whole = np.median([_errors(case, make_profile()) for case in cases], axis=0)
    assert near < 0.05 < 0.15 < whole


def _shape(case: dict[str, Any]) -> KvShape:
    engine = case["engine"]
    share = (engine["groups"] - 1) / engine["groups"]
    return KvShape(engine["window"] + engine["block_size"] // 2 - 1, share)


def _errors(case: dict[str, Any], base: Profile) -> list[float]:
    """Differences of mean end-to-end latency from vLLM's, with windows and as if all layers kept all tokens."""
    sent_s = np.array(case["time"])
    taken = (np.array(case["finish"]) - sent_s).mean()
    runs = [_run(case, base, shape) for shape in (_shape(case), None)]
    return [abs((run.raw.finish_s - sent_s).mean() / taken - 1.0) for run in runs]


def test_prompts_longer_than_windows_wait_as_on_vllm(make_profile: Callable[..., Profile]) -> None:
    """A prompt is admitted only if all layers have room for its prefill: where the KV cache holds few such prompts,
    requests take as long as on vLLM, within 10 %."""
    for case in json.loads(gzip.decompress(PREFILLS.read_bytes())):
        assert _errors(case, make_profile())[0] < 0.1


def test_prefixes_are_found_where_windows_keep_them_as_on_vllm(make_profile: Callable[..., Profile]) -> None:
    """Layers with windows lose blocks of a prefix before others do, so vLLM finds fewer prefixes, and requests take
    longer: hits are within 30 % of vLLM's, times within 10 %."""
    for case in json.loads(gzip.decompress(PREFIXES.read_bytes())):
        assert _errors(case, make_profile())[0] < 0.1
        found = _run(case, make_profile(), _shape(case)).cached_tokens
        assert found == pytest.approx(sum(case["cached"]), rel=0.3)


@given(st.lists(st.booleans(), max_size=12), st.integers(0, 3), st.integers(1, 5))
def test_the_end_of_a_hit_is_in_all_windows(keeps: list[bool], own: int, need: int) -> None:
    """Of the blocks found, counted from the first, those count after which layers with a window have all that they
    read: vLLM's search from the last block on, written with lists."""
    blocks, expected = keeps + [True] * own, 0
    for end in range(len(blocks), 0, -1):
        if all(blocks[max(end - need, 0) : end]):
            expected = end
            break
    kept_until = [SimpleNamespace(until=2 * keep) for keep in keeps]
    cache = SimpleNamespace(all=[SimpleNamespace(free_seat=0)], blocks=kept_until)
    server = SimpleNamespace(window=need * 16 - 7, block_size=16, passed=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(holding, "entry_at", lambda cache, s, place, later, size: place)
        patch.setattr(holding, "in_window", holding.in_window.py_func)
        kept = holding.kept_by_windows.py_func(SimpleNamespace(server=server), cache, len(keeps), own)
    assert kept == expected


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize(("prefix", "states"), [(700, 0), (1600, 2), (4000, 5)])
def test_prefixes_are_found_where_a_state_is_cached(
    prefix: int, states: int, drafts: bool, make_profile: Callable[..., Profile]
) -> None:
    """Blocks hold 784 tokens where they are as large as a state: what vLLM 0.32's scheduler finds of a prefix of this
    many tokens with one group of layers with attention and three with states; with drafts, a block less."""
    count, shared, full = 6, prefix // 16, (prefix + 320) // 16
    engine = {
        "max_model_len": 8192, "block_size": 16, "blocks": 4096, "max_num_seqs": 64, "max_num_batched_tokens": 2048,
        "max_loras": 1, "prefix_caching": True, "async_scheduling": True,
        **({"method": "eagle", "num_speculative_tokens": 3} if drafts else {}),
    }  # fmt: skip
    case = {
        "engine": engine, "law": {"base": 0.01, "token": 2e-5}, "version": "0.32.0", "adapter": [0] * count,
        "time": [float(k) for k in range(count)], "prompt": [prefix + 300] * count, "output": [20] * count,
        "blocks": [[*range(shared), *range(k * 1000 + shared, k * 1000 + full)] for k in range(count)],
    }  # fmt: skip
    sim = _run(case, make_profile(), KvShape(request_tokens=2744.0, state_block=784))
    assert sim.raw.found is not None
    assert sim.raw.found.tolist() == [0, *[784 * max(states - drafts, 0)] * (count - 1)]


def test_windows_keep_blocks_after_days(monkeypatch: pytest.MonkeyPatch) -> None:
    """More blocks than 32 bits count leave the free queue in a week: what is freed then is still kept."""
    monkeypatch.setattr(holding, "free_blocks", holding.free_blocks.py_func)
    server = SimpleNamespace(block_size=16, window=100, passed=3e9, kv_blocks=5000, used=1000)
    entry = np.zeros(1, dtype=pool.BLOCKS)[0]
    entry.until = holding.until_of.py_func(SimpleNamespace(server=server), 0, 10_000)
    assert 3e9 + 3000 < entry.until < 3e9 + 5000
    entry.until = holding.until_of.py_func(SimpleNamespace(server=server), 620, 10_000)
    assert entry.until > 1e12


@pytest.mark.parametrize(("tokens", "cached", "blocks"), [
    (164, 0, 13), (1100, 0, 86), (1100, 1000, 69), (1400, 0, 99), (1600, 0, 105),
])  # fmt: skip
def test_layers_with_windows_keep_the_steps_in_flight(
    tokens: int, cached: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of a token's KV cache is dropped beyond a window of 100 tokens and two steps of 512; a request never needs
    more than all of the KV cache."""
    server = SimpleNamespace(
        window=100, windowed=0.5, share_held=0.8, depth=2, token_budget=512, block_size=16, kv_blocks=105
    )
    monkeypatch.setattr(schedule, "blocks_of", schedule.blocks_of.py_func)
    assert schedule.to_admit.py_func(server, tokens, cached) == blocks


def test_the_cases_cover_what_differs() -> None:
    """Each pair of settings has cases, some of which preempt or find prefixes, and so have older versions."""
    modes = {(case["engine"]["prefix_caching"], bool(case["engine"].get("async_scheduling"))) for case in CASES}
    assert len(modes) == 4
    assert len({case["version"] for case in CASES}) >= 4
    assert sum(case["preemptions"] > 0 for case in CASES) > 2
    assert sum(sum(case["cached"]) > 0 for case in CASES) > 5


def _case(seed: int, version: str, caching: bool, ahead: bool, more: str = "") -> dict[str, Any]:
    """A random case: requests of a few adapters, half of them further turns of others; ids of some tokens each."""
    rng = random.Random(seed)
    size = rng.choice([16, 32])
    tokens = rng.choice([size, size, 8, 24, 64])
    adapters, n, longest = rng.choice([1, 3, 12]), rng.choice([10, 40]), 400
    fresh = iter(range(10**6))
    prefix = [[next(fresh) for _ in range(rng.choice([0, 2, 6]))] for _ in range(adapters)]
    rows: list[tuple[float, int, int, int, list[int]]] = []
    for _ in range(n):
        time_s = (rows[-1][0] if rows else 0.0) + rng.expovariate(rng.choice([5.0, 40.0]))
        adapter, output = rng.randrange(adapters), rng.randint(1, 60)
        ids, prompt = prefix[adapter], 0
        if rows and rng.random() < 0.5:
            _, adapter, before, answer, ids = rng.choice(rows)
            prompt = before + answer
        prompt = max(prompt, len(ids) * tokens) + rng.randint(1, 100)
        if rng.random() < 0.3:
            prompt += -prompt % size
        prompt = min(prompt, longest - output)
        full = (prompt + output) // tokens
        ids = ids[: min(full, prompt // tokens)]
        rows.append((time_s, adapter, prompt, output, ids + [next(fresh) for _ in range(full - len(ids))]))
    engine = {
        "max_model_len": longest, "block_size": size, "blocks": longest // size + 1 + rng.choice([0, 20, 400]),
        "max_num_seqs": rng.choice([3, 64]), "max_num_batched_tokens": rng.choice([256, 2048]),
        "max_loras": rng.choice([1, 2, 12]), "prefix_caching": caching, "async_scheduling": ahead,
    }  # fmt: skip
    columns = dict(zip(("time", "adapter", "prompt", "output", "blocks"), zip(*rows, strict=True), strict=True))
    if "priority" in more:
        engine["scheduling_policy"] = "priority"
        columns["priority"] = [rng.choice([0, 0, 1, -3]) for _ in range(n)]
    for method in {"draft_model", "eagle"} & set(more.split()):
        drafts, further = rng.choice([1, 2, 4]), rng.choice([0, 40])
        if ahead and engine["max_loras"] < adapters:
            further = 40  # where drafts end at max_model_len, vLLM itself ends in an assertion on max_loras
        engine |= {"method": method, "num_speculative_tokens": drafts, "max_model_len": longest + further}
        engine["blocks"] += 4
        columns["acceptance"] = [rng.choice([0.0, 0.3, 0.7, 1.0]) for _ in range(adapters)]
    return columns | {
        "engine": engine, "law": {"base": 0.01, "token": 2e-5}, "tokens": tokens, "version": version,
    }  # fmt: skip


def _naive(case: dict[str, Any]) -> tuple[NaiveScheduler, list[Request]]:
    """What the oracle does: blocks of the server are equal where the ids in which they end are."""
    engine, law, since = case["engine"], case["law"], tuple(map(int, case["version"].split(".")[:2]))
    size, tokens = engine["block_size"], case["tokens"]
    lookahead = int(since >= (0, 33) and engine.get("method") == "eagle")
    server = Settings(
        size, engine["blocks"], engine["max_num_seqs"], engine["max_num_batched_tokens"], engine["max_loras"],
        engine["prefix_caching"], engine["async_scheduling"], law["base"], law["token"],
        reserve_full_isl=since >= (0, 19), unhashed_first=since >= (0, 23), slots_of_running=since >= (0, 33),
        priority=engine.get("scheduling_policy") == "priority", drafts=engine.get("num_speculative_tokens", 0),
        draft_slots=int(engine.get("method") == "draft_model"), eagle=engine.get("method") == "eagle",
        max_model_len=engine["max_model_len"], caches_verified=since >= (0, 33), lookahead=lookahead,
        passes_itself=since >= (0, 33) and engine.get("scheduling_policy") == "priority",
    )  # fmt: skip
    requests = []
    for r, ids in enumerate(case["blocks"]):
        places = (len(ids) * tokens - lookahead) // size
        ends = [(place + 1) * size - 1 + lookahead for place in range(places)]
        blocks = [ids[end // tokens] * 1000 + place for place, end in enumerate(ends)]
        marks = (case[key][r] for key in ("time", "adapter", "prompt", "output"))
        priority = case["priority"][r] if "priority" in case else 0
        chance = case["acceptance"][case["adapter"][r]] if "acceptance" in case else 0.0
        requests.append(Request(r, *marks, blocks, priority, chance))
    return NaiveScheduler(server).run(list(requests)), requests


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    st.integers(0, 10**6), st.sampled_from(["0.16.0", "0.32.0", "0.33.0"]), st.booleans(), st.booleans(),
    st.sampled_from(
        ["", "", "priority", "draft_model", "eagle", "priority draft_model", "priority eagle"]
    ),
)  # fmt: skip
def test_decisions_are_those_of_the_oracle(
    make_profile: Callable[..., Profile], seed: int, version: str, caching: bool, ahead: bool, more: str
) -> None:
    """Every first token and finish agrees to a microsecond, every hit and the number of preemptions exactly."""
    if "draft" in more or "eagle" in more:
        version = version.replace("0.16.0", "0.32.0")
    case = _case(seed, version, caching, ahead and version != "0.16.0", more)
    naive, requests = _naive(case)
    sim = _run(case, make_profile())
    for ours, theirs in ((sim.raw.first_s, "first_s"), (sim.raw.finish_s, "finish_s")):
        expected = [getattr(request, theirs) for request in requests]
        np.testing.assert_allclose(ours, expected, rtol=0.0, atol=1e-6)
    assert sim.preemptions == naive.preemptions
    if caching:
        assert sim.raw.found is not None
        assert sim.raw.found.tolist() == [request.found for request in requests]
