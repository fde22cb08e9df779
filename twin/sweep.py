"""Simulate one server over a grid, to find where it breaks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from packer import checks
from packer.adapter import Adapter
from packer.errors import ValidationError
from packer.io.frames import pl
from packer.profile import Profile
from packer.progress import Progress, silent
from packer.settings import MAX_LORAS
from packer.twin.simulate import simulate
from packer.twin.threads import in_threads
from packer.twin.verdict import verdict_of
from packer.workload import Workload

MAX_POINTS = 100_000
AXES = ("adapters", "rate_factor", "max_loras")
Point = tuple[int, float, int]  # (adapters, rate factor, max_loras).

COLUMNS = (
    "offered_tok_s", "total_token_throughput", "mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms",
    "mean_tpot_ms", "mean_itl_ms", "p99_itl_ms", "kv_cache_tokens", "mean_running", "mean_waiting",
    "preemptions", "adapter_loads", "slo_used",
)  # fmt: skip
"""Metrics of a row, as `Run` names them."""


@dataclass(frozen=True)
class Grid:
    """Points of a sweep: every combination of adapters >= 1, factors of all rates > 0 and `max_loras` >= 1."""

    adapters: tuple[int, ...]
    rate_factors: tuple[float, ...]
    max_loras: tuple[int, ...]

    def __post_init__(self) -> None:
        for value in self.adapters:
            checks.integer("a number of adapters", value, low=1, high=1_000_000)
        for factor in self.rate_factors:
            checks.real("a rate factor", factor, low=0.0, high=1e6, open_low=True)
        for value in self.max_loras:
            checks.integer("max_loras", value, low=1, high=MAX_LORAS)
        if not 0 < len(self) <= MAX_POINTS:
            raise ValidationError(f"Expected a grid of 1 to {MAX_POINTS} points, got {len(self)}.")

    def __len__(self) -> int:
        return len(self.adapters) * len(self.rate_factors) * len(self.max_loras)

    def __iter__(self) -> Iterator[Point]:
        return product(self.adapters, self.rate_factors, self.max_loras)


@dataclass(frozen=True)
class Sweep:
    """A grid with everything on which its rows depend.

    `max_lora_rank` None takes the smallest slot that holds all adapters of the workload, so that a curve over the
    number of adapters does not jump at the first large adapter. `duration_s`: as for `packer.simulate`.
    """

    workload: Workload
    profile: Profile
    grid: Grid
    max_lora_rank: int | None = None
    duration_s: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        settings = self.profile.settings(1, self.workload.slot_rank(self.max_lora_rank))
        object.__setattr__(self, "max_lora_rank", settings.max_lora_rank)

    def row(self, point: Point) -> dict[str, Any]:
        """Return the result at one point; latencies are NaN if the server does not start."""
        n, factor, max_loras = point
        fleet = fleet_of(self.workload, n, self.seed)
        fleet = fleet if factor == 1.0 else fleet.scaled(factor)
        slots: dict[str, Any] = {"max_loras": max_loras, "max_lora_rank": self.max_lora_rank}
        sim = simulate(fleet, self.profile, **slots, duration_s=self.duration_s, seed=self.seed)
        verdict = verdict_of(sim)
        return {
            "adapters": n,
            "rate_factor": factor,
            **slots,
            "memory_error": sim.status == "memory_error",
            "starved": sim.starved,
            **{name: getattr(sim, name) for name in COLUMNS},
            "verdict": verdict.text,
            "limited_by": None if verdict.cause is None else verdict.cause.name,
        }

    def rows(self, *, jobs: int = 1, progress: Progress = silent) -> Iterator[dict[str, Any]]:
        """Yield the results at all points, as they come; `jobs`: threads, -1 for one per core."""
        yield from in_threads(self.row, list(self.grid), jobs=jobs, progress=progress)

    def run(self, *, jobs: int = 1) -> pl.DataFrame:
        """Return all rows as a frame."""
        return sweep_frame(self.rows(jobs=jobs))


def sweep_frame(rows: Iterable[dict[str, Any]]) -> pl.DataFrame:
    """Rows as a frame sorted by point, with axes, flags, `COLUMNS`, the verdict on the goal, and its limit."""
    kinds = {
        "adapters": pl.Int64,
        "rate_factor": pl.Float64,
        **dict.fromkeys(("max_loras", "max_lora_rank"), pl.Int64),
        **dict.fromkeys(("memory_error", "starved"), pl.Boolean),
        **dict.fromkeys(COLUMNS, pl.Float64),
        **dict.fromkeys(("kv_cache_tokens", "preemptions", "adapter_loads"), pl.Int64),
        **dict.fromkeys(("verdict", "limited_by"), pl.String),
    }
    return pl.DataFrame(list(rows), schema=kinds).sort(AXES)


def fleet_of(workload: Workload, n: int, seed: int) -> Workload:
    """The first `n` adapters, then copies drawn with the seed, whatever `n`; raises `ValidationError` for a trace."""
    have = len(workload)
    if n <= have:
        return workload if n == have else workload.subset(range(n))
    if workload.arrivals.trace is not None:
        raise ValidationError(f"A replayed trace has requests for its {have} adapters only, got {n} adapters.")
    taken = set(workload.names)
    adapters = list(workload.adapters)
    # A larger draw begins with the numbers of a smaller one, so fleets do, too.
    for k, i in enumerate(np.random.default_rng(seed).integers(have, size=n - have), start=1):
        adapters.append(_copy(workload.adapters[i], k, taken))
    return replace(workload, adapters=tuple(adapters))


def _copy(adapter: Adapter, k: int, taken: set[str]) -> Adapter:
    """Return the adapter under a name that is not taken yet."""
    ending = f"~{k}"
    while (name := adapter.name[: checks.LONGEST_NAME - len(ending)] + ending) in taken:
        ending += "~"
    taken.add(name)
    return replace(adapter, name=name)


def x_axis(frame: pl.DataFrame) -> str:
    """Return the axis that curves run over: the first of `AXES` with more than one value, else the first."""
    return next((axis for axis in AXES if frame[axis].n_unique() > 1), AXES[0])


def max_packs(frame: pl.DataFrame, *, within_goal: bool = False) -> pl.DataFrame:
    """Each curve's feasible row with the highest offered load; `within_goal`: among those that keep the goal."""
    others = [axis for axis in AXES if axis != x_axis(frame)]
    feasible = frame.filter(~pl.col("starved") & ~pl.col("memory_error"))
    if within_goal:
        feasible = feasible.filter(pl.col("slo_used") <= 1.0)
    ordered = feasible.sort("offered_tok_s", "total_token_throughput")
    return ordered.group_by(others, maintain_order=True).last().sort(others).select(frame.columns)
