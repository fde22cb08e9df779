"""Solvers' plans on real servers: equal bins of different plans are measured once."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from packer.bin import Bin
from packer.plan import Plan
from packer.twin.live.campaign import Progress
from packer.twin.live.launch import Launch
from packer.twin.live.validate import BinReport, Validation, ValidationSpec, difference
from packer.workload import Workload


@dataclass(frozen=True, eq=False)
class MeasuredPlan:
    """A plan on real servers: summed throughput, mean latencies over completed requests."""

    gpus: int
    unplaced: int
    total_token_throughput: float
    predicted_token_throughput: float
    offered_tok_s: float
    mean_ttft_ms: float | None
    mean_itl_ms: float | None
    starved_gpus: tuple[int, ...]
    memory_error_gpus: tuple[int, ...]
    failures: tuple[str, ...]

    @property
    def feasible(self) -> bool:
        """Every adapter placed, every server started, none starved."""
        return not (self.unplaced or self.starved_gpus or self.memory_error_gpus or self.failures)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        error = difference(self.predicted_token_throughput, self.total_token_throughput)
        return {**asdict(self), "feasible": self.feasible, "throughput_smape_percent": error}


def distinct_bins(plans: Mapping[str, Plan]) -> tuple[list[Bin], dict[str, list[int]]]:
    """The different bins of several plans of one workload, and where each plan's bins are among them."""
    bins: list[Bin] = []
    known: dict[Any, int] = {}
    places: dict[str, list[int]] = {}
    for name, plan in plans.items():
        places[name] = []
        for bin_ in plan.bins:
            content = (frozenset(_shares(bin_)), bin_.settings, bin_.profile.fingerprint)
            if content not in known:
                known[content] = len(bins)
                bins.append(bin_)
            places[name].append(known[content])
    return bins, places


def _shares(bin_: Bin) -> list[tuple[int, float]]:
    return list(zip(bin_.adapters, bin_.shares, strict=True))


def _key(fleet: Workload, bin_: Bin) -> str:
    """A folder name that says what runs there, so that other plans of the fleet find it again."""
    adapters = sorted((fleet.names[i], share) for i, share in _shares(bin_))
    digest = hashlib.sha256(repr(adapters).encode()).hexdigest()[:12]
    return f"{bin_.max_loras}x{bin_.max_lora_rank}-{len(adapters)}-{digest}"


def measure_plans(
    plans: Mapping[str, Plan],
    fleet: Workload,
    launch: Launch,
    folder: Path,
    spec: ValidationSpec,
    progress: Progress = lambda _what, _done, _total: None,
) -> dict[str, MeasuredPlan]:
    """Measure the plans of several solvers (name → plan) on real servers; resumes in the same folder."""
    bins, places = distinct_bins(plans)
    keys = [_key(fleet, bin_) for bin_ in bins]
    reports = Validation(launch, fleet, bins, folder, spec, progress, keys).run() if bins else []
    return {
        name: measured_plan([reports[i] for i in places[name]], len(plan.unplaced))
        for name, plan in plans.items()
    }


def measured_plan(reports: list[BinReport], unplaced: int) -> MeasuredPlan:
    """One plan's figures from the reports of its bins."""
    loads = [[run.outcome.load for run in report.runs] for report in reports]
    done = [float(sum(len(load.done) for load in each if load is not None)) for each in loads]
    return MeasuredPlan(
        len(reports),
        unplaced,
        sum(r.mean("measured", "total_token_throughput") or 0.0 for r in reports),
        sum(r.mean("predicted", "total_token_throughput") or 0.0 for r in reports),
        float(sum(np.mean([run.simulation.offered_tok_s for run in r.runs]) for r in reports if r.runs)),
        _weighted([r.mean("measured", "mean_ttft_ms") for r in reports], done),
        _weighted([r.mean("measured", "mean_itl_ms") for r in reports], done),
        tuple(i for i, r in enumerate(reports) if r.starved[1] and not r.memory_error[1]),
        tuple(i for i, r in enumerate(reports) if r.memory_error[1]),
        tuple(r.failure for r in reports if r.failure is not None and not r.memory_error[1]),
    )


def _weighted(values: list[float | None], weights: list[float]) -> float | None:
    known = [(v, w) for v, w in zip(values, weights, strict=True) if v is not None and w > 0]
    if not known:
        return None
    return sum(v * w for v, w in known) / sum(w for _, w in known)
