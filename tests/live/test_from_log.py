"""From step logs to a profile: a known law comes back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from packer.engine_spec import EngineSpec
from packer.errors import FileFormatError, LiveError
from packer.live import from_log
from packer.live.launch import Emulation, Launch
from packer.live.results import LoadResult
from packer.live.step_log import Steps, read_steps
from packer.profile import GpuSpec, ModelSpec
from packer.settings import Settings
from packer.twin.law.law import coefficient_vector
from packer.twin.law.linear import linear_features

LAW = {"base_ms": 1.9, "per_decode_ms": 0.05, "per_prefill_token_ms": 0.02, "first_adapter_ms": 2.5}
PER_SLOT_RANK_TOKEN_MS = 0.006


@pytest.fixture
def launch() -> Launch:
    """How a small server is started; nothing starts here."""
    return Launch(
        name="small",
        model="none",
        adapter_path="{name}",
        engine=EngineSpec("vllm", "0.32.0", 256, 512, 64, block_size=32),
        model_spec=ModelSpec("tiny", 1.0, 2048.0, 17408.0),
        gpu=GpuSpec("none", 1e9),
    )


def make_steps(slot_rank: int, n: int = 4000, noise: float = 0.05, seed: int = 0) -> Steps:
    """A log that follows the law, with noise, some prefills, some steps without adapters and some loads."""
    rng = np.random.default_rng(seed)
    decodes = rng.integers(0, 65, n).astype(float)
    prefill = np.where(rng.random(n) < 0.2, rng.integers(8, 400, n), 0).astype(float)
    decodes = np.where(decodes + prefill == 0, 1.0, decodes)
    adapters = np.minimum(rng.integers(0, 9, n), decodes + (prefill > 0)).astype(float)
    tokens = decodes + prefill
    ms = LAW["base_ms"] + LAW["per_decode_ms"] * decodes + LAW["per_prefill_token_ms"] * prefill
    ms = ms + (adapters > 0) * (LAW["first_adapter_ms"] + PER_SLOT_RANK_TOKEN_MS * slot_rank * tokens)
    ms = ms * rng.normal(1.0, noise, n)
    loads = (rng.random(n) < 0.05).astype(float)
    host_ms = loads * (1.0 + 0.1 * 8)
    start = np.concatenate([[0.0], np.cumsum(ms + host_ms)[:-1]]) / 1e3
    zero = np.zeros(n)
    return Steps(
        start,
        ms,
        np.ones(n),
        decodes,
        (prefill > 0).astype(float),
        prefill,
        50 * decodes,
        adapters,
        8 * adapters,
        loads,
        8 * loads,
        host_ms,
        zero,
        zero,
        zero,
    )


def predict(latency: dict[str, float], decodes: float, prefill: float, slot_rank: int) -> float:
    """Time of a step with adapters by fitted coefficients that this test's law can produce."""
    tokens = decodes + prefill
    c = dict.fromkeys((*from_log.TERMS, *from_log.SLOT_RANK_TERMS), 0.0) | latency
    ms = c["base_ms"] + c["per_decode_ms"] * decodes + c["per_prefill_token_ms"] * prefill
    ms += c["prefill_step_ms"] * (prefill > 0) + c["first_adapter_ms"] + c["per_slot_rank_ms"] * slot_rank
    ms += (c["per_lora_token_ms"] + c["per_slot_rank_token_ms"] * slot_rank) * tokens
    adapters = 4.0
    ms += c["per_adapter_ms"] * adapters + c["per_rank_ms"] * 8 * adapters
    return ms + c["per_adapter_token_ms"] * adapters * tokens + c["per_kv_token_ms"] * 50 * decodes


def test_the_law_comes_back() -> None:
    """Predictions of the fitted law agree with the true one at states of light and full batches."""
    logs = {rank: make_steps(rank, seed=rank) for rank in (8, 32)}
    latency, errors = from_log.fit_step_law([from_log.from_steps(s, Settings(8, rank)) for rank, s in logs.items()])
    coefficients = dict(latency.coefficients)
    for decodes, prefill, rank in ((1, 0, 8), (32, 0, 8), (64, 0, 32), (16, 200, 32)):
        tokens = decodes + prefill
        true = 1.9 + 0.05 * decodes + 0.02 * prefill + 2.5 + PER_SLOT_RANK_TOKEN_MS * rank * tokens
        assert predict(coefficients, decodes, prefill, rank) == pytest.approx(true, rel=0.06)
    assert errors["step_time_cross_validated_percent"] < 6.0


def test_experts_show_in_the_steps() -> None:
    """Steps of a mixture of experts grow with the experts that their tokens reach: the law of a log has them, so that
    small and full batches are predicted; the law of a dense model has none."""
    dense = make_steps(8)
    tokens = dense.decodes + dense.prefill_tokens
    more_ms = 20.0 * (1.0 - (1.0 - 1 / 24) ** tokens)
    later_s = np.cumsum(np.concatenate([[0.0], more_ms[:-1]])) / 1e3
    mixed = replace(dense, start_s=dense.start_s + later_s)
    laws = [from_log.fit_step_law([from_log.from_steps(steps, Settings(8, 8))]) for steps in (dense, mixed)]
    assert [law.expert_share > 0.0 for law, _ in laws] == [False, True]
    assert laws[1][1]["step_time_cross_validated_percent"] < 6.0
    states = {"decodes": (1, 4, 24, 64), "graph_max_tokens": 512}
    found = linear_features(**states, expert_share=laws[1][0].expert_share) @ coefficient_vector(laws[1][0])
    batch = np.array(states["decodes"])
    expected = LAW["base_ms"] + LAW["per_decode_ms"] * batch + 20.0 * (1.0 - (1.0 - 1 / 24) ** batch)
    assert found == pytest.approx(expected, rel=0.1)


def test_noise_does_not_make_the_law_faster() -> None:
    """With single steps 30 % off either way, the law's mean time is that of the steps, within 1.5 %."""
    steps = make_steps(8, n=6000, noise=0.3)
    latency, _ = from_log.fit_step_law([from_log.from_steps(steps, Settings(8, 8))])
    periods = steps.periods_ms()[:-1] - steps.host_ms[:-1]
    features = linear_features(
        decodes=steps.decodes[:-1],
        prefill_tokens=steps.prefill_tokens[:-1],
        adapters=steps.adapters[:-1],
        sum_ranks=steps.sum_ranks[:-1],
        slots=8.0,
        slot_rank=8.0,
        kv_tokens=steps.kv_tokens[:-1],
        waiting=0.0,
        graph_max_tokens=512,
    )
    law_ms = features @ coefficient_vector(latency)
    assert float(law_ms.mean()) == pytest.approx(float(periods.mean()), rel=0.015)


def test_slot_terms_need_servers_that_differ() -> None:
    """One server can't tell what its slots cost, so those terms stay out."""
    latency, _ = from_log.fit_step_law([from_log.from_steps(make_steps(8), Settings(8, 8))])
    assert not set(latency.coefficients) & {*from_log.SLOT_TERMS, *from_log.SLOT_RANK_TERMS}


def test_waiting_requests_cost_time() -> None:
    """A scheduler that spends 2 µs on each waiting request: the term comes back."""
    steps = make_steps(8, noise=0.02)
    waiting = np.where(np.arange(len(steps)) % 3 == 0, 0.0, 800.0)
    slow = np.cumsum(np.concatenate([[0.0], (0.002 * waiting)[:-1]])) / 1e3
    late = replace(steps, start_s=steps.start_s + slow)
    seen = from_log.from_steps(late, Settings(8, 8), waiting=waiting)
    latency, _ = from_log.fit_step_law([seen])
    assert latency.coefficients["per_waiting_ms"] == pytest.approx(0.002, rel=0.2)


def test_waiting_requests_are_known_from_the_client() -> None:
    """Sent, not finished and not in the batch: worked by hand on the client's clock."""
    steps = make_steps(8, n=3)
    steps = replace(
        steps, start_s=np.array([100.5, 101.5, 102.5]), decodes=np.array([1.0, 1.0, 1.0]), prefills=np.zeros(3)
    )
    none, ints = np.zeros(3), np.zeros(3, dtype=np.int64)
    load = LoadResult(
        none,
        ints,
        ints,
        ints,
        np.array([0.0, 0.1, 1.0]),
        np.full(3, np.nan),
        np.array([2.0, np.nan, np.nan]),
        ints,
        ints,
        none,
        ints,
        duration_s=5.0,
        started_monotonic_s=100.0,
    )
    assert from_log.waiting_at(steps, load).tolist() == [1.0, 2.0, 1.0]


def test_too_few_states_are_refused() -> None:
    """A handful of equal steps fits no law; the message says how many there were."""
    steps = make_steps(8, n=6)
    with pytest.raises(LiveError, match="at least 12"):
        from_log.fit_step_law([from_log.from_steps(steps, Settings(8, 8))])


def test_an_outlier_counts_as_a_few_steps() -> None:
    """A pause of a second in one step moves the mean of its kind by less than its clip."""
    steps = make_steps(8, noise=0.0)
    late = steps.start_s.copy()
    late[2001:] += 1.0
    before = from_log.from_steps(steps, Settings(8, 8)).step_ms
    after = from_log.from_steps(replace(steps, start_s=late), Settings(8, 8)).step_ms
    assert float(np.abs(after / before - 1.0).max()) < from_log.OUTLIER


def test_loading_has_its_own_line() -> None:
    """Host loads of 1.8 ms each come back as such, and disk loads that never happened as 0."""
    loading = from_log.fit_loading([make_steps(8)])
    assert loading.host_base_ms + 8 * loading.host_per_rank_ms == pytest.approx(1.8, rel=1e-6)
    assert loading.disk_base_ms == 0.0


def test_memory_from_two_points_is_a_line(launch: Launch) -> None:
    """Bytes per slot and rank from the difference of two servers; both points stay exact."""
    kv = launch.model_spec.kv_bytes_per_token
    points = {Settings(8, 8): int((1e8 - 64 * 20000) / kv), Settings(32, 32): int((1e8 - 1024 * 20000) / kv)}
    memory = from_log.fit_memory(launch, points)
    assert memory.slot_bytes_per_rank == pytest.approx(20000, rel=1e-3)
    assert memory.kv_budget_bytes == pytest.approx(1e8, rel=1e-3)
    assert len(memory.measured) == 2
    ranks = replace(launch, engine=replace(launch.engine, data_parallel_size=2))
    assert from_log.fit_memory(ranks, points).min_kv_tokens == 2 * launch.engine.max_model_len


def test_emulated_memory_keeps_its_rule(launch: Launch) -> None:
    """What packer deducts itself needs no fit, and is the same rule in the profile."""
    emulated = replace(launch, emulation=Emulation(2e7, 17408.0))
    memory = from_log.fit_memory(emulated, {Settings(8, 16): 8640})
    assert (memory.kv_budget_bytes, memory.slot_bytes_per_rank) == (2e7, 17408.0)
    assert emulated.emulation is not None
    assert emulated.emulation.kv_bytes(Settings(64, 64)) < 0


def test_no_capacity_is_an_error(launch: Launch) -> None:
    """A profile without a KV capacity would be a guess."""
    with pytest.raises(LiveError, match="KV cache"):
        from_log.fit_memory(launch, {})


HEAD = (
    "start_s,model_ms,follows,decodes,prefills,prefill_tokens,kv_tokens,adapters,sum_ranks,"
    "host_loads,host_ranks,host_ms,disk_loads,disk_ranks,disk_ms"
)


def test_a_step_log_cut_short_is_read(tmp_path: Path) -> None:
    """The server was killed while writing: the half line is dropped, idle gaps are no steps."""
    rows = ["0,1,0,1,0,0,9,1,8,0,0,0,0,0,0", "0.005,1,1,1,0,0,9,1,8,0,0,0,0,0,0", "1.5,1,0,1,0,0,9,1,8,0,0,0,0,0,0"]
    path = tmp_path / "steps.csv"
    path.write_text("\n".join([HEAD, *rows, "1.6,1,1"]))
    steps = read_steps(path)
    assert len(steps) == 3
    periods = steps.periods_ms()
    assert periods[0] == pytest.approx(5.0)
    assert np.isnan(periods[1])
    assert np.isnan(periods[2])


def test_other_columns_are_refused(tmp_path: Path) -> None:
    """A log of another version is an error that names the file and the columns."""
    path = tmp_path / "steps.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(FileFormatError, match=r"steps\.csv: expected the columns"):
        read_steps(path)


def test_the_worker_writes_the_columns_that_are_read() -> None:
    """Writer and reader live in different environments; their columns must be the same."""
    from packer.live import inside

    source = Path(inside.__file__).with_name("packer_step_worker.py").read_text()
    assert "".join(part for part in HEAD.split("host_loads")[0]) in source
    assert "host_loads" + HEAD.split("host_loads")[1] in source
