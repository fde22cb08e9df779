"""Measurements of `packer live calibrate`: the loads, and the observations that follow from their outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from packer import checks
from packer.adapter import Adapter
from packer.arrays import distinct
from packer.arrival import Arrivals, RequestTrace
from packer.errors import LiveError
from packer.io.files import claimed
from packer.io.web import Address
from packer.lengths import Lengths
from packer.live import from_log
from packer.live.campaign import Campaign
from packer.live.environment import served_models
from packer.live.launch import Launch
from packer.live.server import ServerOptions
from packer.live.task import BASE, Endpoint, Outcome, Session, Task
from packer.profile import MemorySpec, Profile
from packer.progress import Progress, silent
from packer.settings import Settings
from packer.workload import Workload

DRAIN_S = 120.0
MIXED_S = 20.0
BURST_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FIRST_TOK_S_PER_SEQ = 8.0  # First estimate of a server's output per sequence; scales the rates of mixed loads.
BURST_PAUSE_S = 1.0
PREFILL_PAUSE_S = 0.4
BUDGET_ENDED = "the budget ended before the measurements did; the same command goes on from here"
SERVERS: tuple[Settings, ...] = (Settings(8, 16), Settings(32, 8), Settings(8, 64), Settings(16, 32))
"""Settings of the servers that a calibration starts by default, most important first."""


def options_for(launch: Launch, adapters: Sequence[Adapter], settings: Settings) -> ServerOptions:
    """Return the options of a server, with emulated slot memory if the launch file has it."""
    folders = tuple((a.name, launch.adapter_folder(a.name, a.rank)) for a in adapters if a.rank)
    settings = settings if folders else replace(settings, max_loras=0)
    kv_bytes = launch.emulation.kv_bytes(settings) if launch.emulation else None
    return ServerOptions(folders, settings, kv_bytes)


def _replay(key: str, adapters: Sequence[Adapter], trace: RequestTrace, duration_s: float) -> Task:
    return Task(key, Workload(adapters, arrivals=Arrivals("trace", trace=trace)), duration_s, drain_s=DRAIN_S)


def burst(launch: Launch, key: str, adapters: Sequence[Adapter], batch: int) -> Task:
    """`batch` requests at once with short prompts and long outputs: decode steps of a fixed batch."""
    room = launch.engine.max_model_len
    prompt, output = max(1, min(16, room // 4)), max(2, min(64, room // 2))
    adapter = np.arange(batch) % len(adapters)
    trace = RequestTrace(np.zeros(batch), adapter, np.full(batch, prompt), np.full(batch, output))
    return _replay(key, adapters, trace, 0.5)


def prefills(launch: Launch, key: str, adapter: Adapter, together: int) -> Task:
    """Prompts of all lengths, `together` at a time, two output tokens each: prefill steps."""
    room = min(launch.engine.max_model_len - 2, launch.engine.max_num_batched_tokens)
    lengths = distinct(np.geomspace(8, room, 8).astype(np.int64))
    prompt = np.repeat(lengths, together)
    time_s = np.repeat(PREFILL_PAUSE_S * np.arange(len(lengths)), together)
    n = len(prompt)
    trace = RequestTrace(time_s, np.zeros(n, dtype=np.int64), prompt, np.full(n, 2))
    return _replay(key, [adapter], trace, PREFILL_PAUSE_S * len(lengths) + 0.1)


def sessions(launch: Launch, servers: Sequence[Settings] = SERVERS, *, seed: int = 0) -> list[Session]:
    """The planned measurements: for each server bursts, prefills and three mixed loads."""
    planned = []
    for k, settings in enumerate(servers):
        loras, rank = settings.max_loras, settings.max_lora_rank
        ranks = [r for r in checks.SLOT_RANKS if 8 <= r <= rank] or [rank]
        adapters = [Adapter(f"c{i}", ranks[-1 - i % len(ranks)], 1.0) for i in range(2 * loras)]
        probes = _bursts(launch, adapters, loras)
        if launch.step_log:  # every step logs its own batch: bursts need not be kept apart
            probes = [in_a_row("probes", probes, BURST_PAUSE_S)]
        tasks = [*probes, *_mixes(launch, adapters, seed + 10 * k)]
        options = options_for(launch, adapters, settings)
        planned.append(Session(f"slots-{loras}-rank-{rank}", options, tuple(tasks)))
    return planned


def in_a_row(key: str, tasks: Sequence[Task], pause_s: float) -> Task:
    """Join tasks with traces into one; each starts `pause_s` after the last request of the previous task."""
    adapters: dict[str, Adapter] = {}
    parts: list[RequestTrace] = []
    start = 0.0
    for task in tasks:
        trace = task.workload.arrivals.trace
        assert trace is not None
        for adapter in task.workload.adapters:
            adapters.setdefault(adapter.name, adapter)
        places = np.array([list(adapters).index(a.name) for a in task.workload.adapters], dtype=np.int64)
        parts.append(replace(trace, time_s=start + trace.time_s, adapter=places[trace.adapter]))
        start += float(trace.time_s[-1]) + pause_s
    return _replay(key, list(adapters.values()), RequestTrace.joined(parts), start)


def _bursts(launch: Launch, adapters: Sequence[Adapter], loras: int) -> list[Task]:
    base = Adapter(BASE, 0, 1.0)
    tasks = []
    for batch in (b for b in BURST_BATCHES if b <= launch.engine.max_num_seqs):
        tasks.append(burst(launch, f"decode-{batch}-base", [base], batch))
        sizes = sorted({1, min(4, batch, loras), min(batch, loras)})
        tasks += [burst(launch, f"decode-{batch}-adapters-{n}", adapters[:n], batch) for n in sizes]
    for together in (1, 3):
        tasks.append(prefills(launch, f"prefill-{together}-base", base, together))
        tasks.append(prefills(launch, f"prefill-{together}-adapter", adapters[0], together))
    return tasks


def _mixes(launch: Launch, adapters: Sequence[Adapter], seed: int) -> list[Task]:
    """Poisson loads over all adapters: the states that real traffic visits."""
    room = launch.engine.max_model_len
    mean_in, mean_out = min(200.0, room / 5), min(150.0, room / 7)
    inputs = Lengths.gamma(mean_in, 0.8, high=room * 3 // 5)
    outputs = Lengths.gamma(mean_out, 0.8, high=room * 2 // 5)
    full = FIRST_TOK_S_PER_SEQ * launch.engine.max_num_seqs / mean_out
    tasks = []
    for i, (name, share) in enumerate((("light", 0.5), ("busy", 1.5), ("starved", 5.0))):
        fleet = [Adapter(a.name, a.rank, share * full / len(adapters)) for a in adapters]
        workload = Workload(fleet, inputs, outputs, length_correlation=0.0)
        tasks.append(Task(f"mixed-{name}", workload, MIXED_S, seed + i))
    return tasks


def calibrate(
    launch: Launch, folder: Path, *, servers: Sequence[Settings] = SERVERS, budget_s: float | None = None,
    seed: int = 0, progress: Progress = silent,
) -> tuple[Profile, list[Outcome], bool]:  # fmt: skip
    """Measure servers of a launch file; return the fitted profile, outcomes, and whether the budget cut it short.
    Raises `LiveError`: nothing usable was measured; the message says why."""
    campaign = Campaign(launch, folder, budget_s=budget_s, progress=progress)
    with claimed(folder):
        outcomes = campaign.run(sessions(launch, servers, seed=seed))
    return _fitted(campaign, outcomes, None)


def calibrate_url(
    where: Address | str, known: Profile, folder: Path, *, settings: Settings, budget_s: float | None = None,
    seed: int = 0, progress: Progress = silent,
) -> tuple[Profile, list[Outcome], bool]:  # fmt: skip
    """Measure a running server from the outside and fit its profile; returns the same as `calibrate`.

    `known`: a profile or estimate with the model, GPU and engine settings, which the server does not report.
    `settings`: the server's slots; all adapters are assumed to have rank `max_lora_rank`.
    Raises `LiveError`: the server does not answer, or serves no adapters.
    """
    where = Address(where.rstrip("/")) if isinstance(where, str) else where
    base, served = served_models(where)
    if not base or not served:
        rule = f"{where.url} serves {len(base + served)} models:"
        raise LiveError(f"{rule} expected the base model and at least one adapter.")
    launch = Launch(known.name, "", "{name}", known.engine, known.model, known.gpu, step_log=False)
    loras, rank = settings.max_loras, settings.max_lora_rank
    adapters = [Adapter(name, rank, 1.0) for name in served]
    tasks = (*_bursts(launch, adapters, loras), *_mixes(launch, adapters, seed))
    session = Session("url", ServerOptions((), settings), tasks)
    endpoint = Endpoint(where.url, base=base[0], authorization=where.authorization)
    campaign = Campaign(launch, folder, budget_s=budget_s, progress=progress, endpoint=endpoint)
    with claimed(folder):
        outcomes = campaign.run([session])
    return _fitted(campaign, outcomes, known.memory)


def _fitted(campaign: Campaign, runs: list[Outcome], memory: MemorySpec | None) -> tuple[Profile, list[Outcome], bool]:
    try:
        return profile_of(campaign.launch, runs, memory), runs, campaign.out_of_time
    except LiveError as error:
        if not campaign.out_of_time:
            raise
        raise LiveError(f"{error} {BUDGET_ENDED.capitalize()}.") from None


def profile_of(launch: Launch, outcomes: Sequence[Outcome], memory: MemorySpec | None = None) -> Profile:
    """Fit a profile to outcomes; `memory` is used if no KV capacity was read."""
    observations, logs, capacity = [], [], {}
    for outcome in outcomes:
        settings = outcome.session.options.settings
        if outcome.kv_cache_tokens is not None:
            capacity[settings] = outcome.kv_cache_tokens
        if outcome.load is None or not len(outcome.load.done):
            continue
        if outcome.steps is not None:
            waiting = from_log.waiting_at(outcome.steps, outcome.load)
            observations.append(from_log.from_steps(outcome.steps, settings, waiting))
            logs.append(outcome.steps)
        else:
            observations.append(from_client(outcome))
    if not observations:
        failures = {o.failure.message for o in outcomes if o.failure is not None}
        failures |= {o.load.fault for o in outcomes if o.load is not None and o.load.fault is not None}
        raise LiveError(f"No server could be measured: {'; '.join(sorted(failures)) or 'the budget is too short'}.")
    how = "per-step log" if logs else "gaps between tokens as the client saw them"
    return from_log.assemble(launch, observations, logs, capacity, how, memory)


def from_client(outcome: Outcome) -> from_log.Observations:
    """Return step times without a step log, from bursts, whose batch is known from the outside. Decodes: the median gap
    between the tokens of a burst. Prefills: the TTFT of prompts that are sent alone."""
    load, task = outcome.load, outcome.task
    rows: list[tuple[float, ...]] = []
    if load is not None:
        used = (task.workload.adapters[i] for i in distinct(load.adapter[load.done]))
        real = [a.rank for a in used if a.rank]
        ranks, n = float(sum(real)), len(load.done)
        if task.key.startswith("decode-") and len(load.itl_ms):
            context = float((load.input_tokens[load.done] + load.output_tokens[load.done] / 2).sum())
            # In a burst, each step gives each of the n requests one gap.
            gap_ms, steps = float(np.median(load.itl_ms)), len(load.itl_ms) / n
            rows.append((n, 0.0, len(real), ranks, context, gap_ms, steps, 0.0))
        elif task.key.startswith("prefill-1-"):
            for tokens, ttft_ms in zip(load.input_tokens[load.done], load.ttft_ms, strict=True):
                rows.append((0.0, tokens, len(real), ranks, 0.0, ttft_ms, 1.0, 0.0))
    columns = np.array(rows, dtype=np.float64).reshape(-1, 8).T
    return from_log.Observations(outcome.session.options.settings, *columns)
