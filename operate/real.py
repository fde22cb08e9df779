"""The plans of a comparison measured on real servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from packer.solvers.compare import PlanFigures, Result
from packer.twin.live.launch import Launch
from packer.twin.live.plans import measure_plans
from packer.twin.live.validate import ValidationSpec
from packer.workload import Workload


def measured(
    results: Sequence[Result],
    fleets: Sequence[Workload],
    launch: Launch,
    folder: Path,
    spec: ValidationSpec,
    progress: Callable[[str, int, int], None] = lambda _what, _done, _total: None,
) -> list[Result]:
    """The results with the figures of real servers; equal servers of different plans are measured once.

    `results`: of `packer.solvers.compare.Comparison.run`.
    `fleets`: the fleets that were planned, one for each number of adapters.
    `launch`, `folder`, `spec`: how servers start, where measurements are kept (the same folder resumes), and how long
    each run is.
    """
    found = list(results)
    for fleet in fleets:
        plans = {
            str(k): result.plan
            for k, result in enumerate(results)
            if result.adapters == len(fleet) and result.plan is not None and result.plan.bins
        }
        place = folder / str(len(fleet))
        for k, row in measure_plans(plans, fleet, launch, place, spec, progress).items():
            figures = PlanFigures(
                "vllm",
                row.total_token_throughput,
                float("nan") if row.mean_ttft_ms is None else row.mean_ttft_ms,
                float("nan") if row.mean_itl_ms is None else row.mean_itl_ms,
                len(row.starved_gpus),
                len(row.memory_error_gpus),
            )
            found[int(k)] = replace(results[int(k)], reference=figures, failures=row.failures)
    return found
