"""Measure the plans of a comparison on real servers; equal bins of different plans are measured once."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from packer.bin import Bin
from packer.evaluation import mean_of
from packer.live.launch import Launch
from packer.live.validate import BinReport, Validation, ValidationSpec
from packer.plan import Plan
from packer.planning.compare import PlanFigures, Result
from packer.progress import Progress, silent
from packer.workload import Workload


def measured(
    results: Sequence[Result], fleets: Sequence[Workload], launch: Launch, folder: Path, spec: ValidationSpec,
    progress: Progress = silent,
) -> list[Result]:  # fmt: skip
    """Results with figures of real servers, equal ones measured once; `folder` keeps them to resume."""
    found = list(results)
    for fleet in fleets:
        own = [(k, each.plan) for k, each in enumerate(results) if each.adapters == len(fleet)]
        plans = {str(k): plan for k, plan in own if plan is not None and plan.bins}
        place = folder / str(len(fleet))
        for k, reports in measure_plans(plans, fleet, launch, place, spec, progress).items():
            figures, failures = figures_of(reports)
            found[int(k)] = replace(results[int(k)], reference=figures, failures=failures)
    return found


def figures_of(reports: Sequence[BinReport]) -> tuple[PlanFigures, tuple[str, ...]]:
    """Figures of a plan from the reports of its servers, and why some could not be measured."""
    loads = [[run.outcome.load for run in report.runs if run.outcome.load is not None] for report in reports]
    requests = [sum(len(load.done) for load in each) for each in loads]
    gaps = [sum(load.gaps for load in each) for each in loads]

    def mean(name: str, weights: Sequence[int]) -> float:
        values = np.array([each.mean("measured", name) for each in reports], dtype=np.float64)  # None: NaN
        return mean_of(values, weights)

    memory_errors = [report.memory_error[1] for report in reports]
    started = [report for report, failed in zip(reports, memory_errors, strict=True) if not failed]
    figures = PlanFigures(
        "vllm", sum(report.mean("measured", "total_token_throughput") or 0.0 for report in reports),
        mean("mean_ttft_ms", requests), mean("mean_itl_ms", gaps),
        sum(bool(report.starved[1]) for report in started), sum(memory_errors),
    )  # fmt: skip
    return figures, tuple(report.failure for report in started if report.failure is not None)


def _key(fleet: Workload, bin_: Bin) -> str:
    """A folder name that identifies the server, so that other plans of the fleet find its measurements."""
    adapters = sorted((fleet.names[i], share) for i, share in zip(bin_.adapters, bin_.shares, strict=True))
    digest = hashlib.sha256(repr(adapters).encode()).hexdigest()[:12]
    return f"{bin_.max_loras}x{bin_.max_lora_rank}-{len(adapters)}-{digest}"


def measure_plans(
    plans: Mapping[str, Plan], fleet: Workload, launch: Launch, folder: Path, spec: ValidationSpec,
    progress: Progress = silent,
) -> dict[str, list[BinReport]]:  # fmt: skip
    """Measure each plan's bins (name → plan) on real servers, equal bins once; resumes in the same folder."""
    keys = {name: [_key(fleet, item) for item in plan.bins] for name, plan in plans.items()}
    bins = {key: item for name, own in keys.items() for key, item in zip(own, plans[name].bins, strict=True)}
    job = Validation(launch, fleet, list(bins.values()), folder, spec, progress, list(bins))
    found = dict(zip(bins, job.run() if bins else [], strict=True))
    return {name: [found[key] for key in own] for name, own in keys.items()}
