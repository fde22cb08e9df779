"""Calibrate on real vLLM, validate the twin on other workloads, compare solvers' plans on real servers.

    python benchmarks/real_vllm/run.py --launch vllm-cpu/launch.toml          # all; about 50 minutes
    python benchmarks/real_vllm/run.py --launch vllm-cpu/launch.toml --only plans

Everything measured is kept in --work and not measured again; figures go to benchmarks/real_vllm/results/.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import packer
from packer.bin import Bin
from packer.io.documents import jsonable
from packer.io.profiles import format_profile, load_profile
from packer.live.calibration import calibrate, options_for, profile_of
from packer.live.campaign import Campaign
from packer.live.launch import Launch, read_launch
from packer.live.task import Outcome, Session, Task
from packer.live.validate import COMPARED, BinReport, ValidationSpec, report_of
from packer.operate.real import figures_of, measure_plans
from packer.settings import Settings
from packer.testing.records import record_text

sys.path.insert(0, str(Path(__file__).parent))
from load_generator import measure_schedule
from machine import machine
from workloads import CASES, SECONDS, Case, fleet, largest_rate, workload_of

RESULTS = Path(__file__).parent / "results"
SERVERS = (Settings(8, 16), Settings(16, 32), Settings(8, 64))
PASSES = 2
"""Everything is measured once a pass, many minutes apart: machines drift, and repeats back to back don't show it."""
SOLVERS = ("greedy", "greedy-paper", "dlora", "maxbase", "random")
SPREADING = ("dlora", "random")
"""These spread over a given number of servers."""
PLAN_CASE = Case("two-bins", 40, (8, 16, 32), 16, 32, 1.35)
STARTED = time.monotonic()


@dataclass(frozen=True)
class Place:
    """Where measurements and figures go, and how long a run is."""

    work: Path
    results: Path
    seconds: float


def say(text: str) -> None:
    """A line with the time since the start."""
    print(f"{time.monotonic() - STARTED:7.0f} s  {text}", flush=True)


def progress(what: str, done: int, total: int) -> None:
    """Print finished tasks only."""
    if total:
        say(f"{done}/{total} {what}")


def write(place: Place, name: str, data: Any) -> None:
    """A result file, committed with the benchmark."""
    (place.results / name).write_text(record_text(jsonable(data)) + "\n", "utf-8")
    say(f"wrote {place.results / name}")


def run_servers(launch: Launch, place: Place) -> None:
    """Calibration and validation in turn; the profile is fitted to the calibrations of all passes."""
    calibrations: list[Outcome] = []
    validations: list[Outcome] = []
    planned: list[tuple[Session, list[Case]]] = []
    for k in range(PASSES):
        say(f"-- pass {k}: calibration")
        folder = place.work / f"calibrate-{k}"
        first, outcomes, _ = calibrate(launch, folder, servers=SERVERS, seed=100 * k, progress=progress)
        calibrations += outcomes
        planned = planned or validation_sessions(launch, first, place.seconds)  # the same loads in all passes
        say(f"-- pass {k}: validation")
        campaign = Campaign(launch, place.work / f"validate-{k}", progress=progress)
        validations += campaign.run([session for session, _ in planned])
    profile = profile_of(launch, calibrations)
    (place.results / "profile.toml").write_text(format_profile(profile))
    say(f"calibrated from {len(calibrations)} loads: {dict(profile.latency.coefficients)}")
    report_validation(launch, place, profile, planned, validations)


def validation_sessions(launch: Launch, profile: packer.Profile, seconds: float) -> list[tuple[Session, list[Case]]]:
    """One session a server with all its cases."""
    found = []
    for server in dict.fromkeys(case.server for case in CASES):
        cases = [case for case in CASES if case.server == server]
        tasks, adapters = [], {}
        for case in cases:
            workload = workload_of(case, profile)
            adapters |= {a.name: a for a in workload.adapters}
            tasks.append(Task(case.name, workload, seconds, seed=1))
        settings = Settings(cases[0].max_loras, cases[0].max_lora_rank)
        options = options_for(launch, list(adapters.values()), settings)
        found.append((Session(server, options, tuple(tasks)), cases))
    return found


def report_validation(
    launch: Launch,
    place: Place,
    profile: packer.Profile,
    planned: Sequence[tuple[Session, list[Case]]],
    outcomes: Sequence[Outcome],
) -> None:
    """Twin against real vLLM on every case."""
    reports = []
    for _session, cases in planned:
        for case in cases:
            mine = [o for o in outcomes if o.task.key == case.name]
            reports.append((case, case_report(case, mine, profile, launch)))
    rows = [row(case, report) for case, report in reports]
    write(place, "validation.json", {"machine": machine(), "bars": bars(rows), "cases": rows})
    (place.results / "validation.md").write_text(markdown(rows))


def case_report(case: Case, outcomes: Sequence[Outcome], profile: packer.Profile, launch: Launch) -> BinReport:
    """Predicted against measured for one case."""
    bin_ = Bin(tuple(range(case.adapters)), profile.settings(case.max_loras, case.max_lora_rank), profile)
    return report_of(0, bin_, outcomes, launch)


def row(case: Case, report: BinReport) -> dict[str, Any]:
    """The case's line of the result file."""
    workload = report.runs[0].outcome.task.workload
    return {
        "case": case.name,
        "adapters": case.adapters,
        "ranks": case.ranks,
        "max_loras": case.max_loras,
        "max_lora_rank": case.max_lora_rank,
        "rate": workload.rate,
        "share": case.share,
        "memory_error": report.memory_error,
        "starved": report.starved,
        "failure": report.failure,
        "figures": {
            name: {
                "predicted": report.mean("predicted", name),
                "measured": [run.measured.get(name) for run in report.runs],
                "smape_percent": report.errors.get(name),
                "repeatability_percent": report.repeatability.get(name),
            }
            for name in COMPARED
        },
        "send_lateness_p99_ms": max(
            (float(np.quantile(r.outcome.load.lateness_ms, 0.99)) for r in report.runs if r.outcome.load), default=None
        ),
    }


def bars(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean errors by regime, their repeatability, and how often starvation and memory errors are predicted right."""
    ran = [r for r in rows if not r["memory_error"][1]]
    groups = {
        "unstarved": [r for r in ran if r["starved"][1] is False],
        "starved": [r for r in ran if r["starved"][1] is True],
    }
    found: dict[str, Any] = {}
    for group, members in groups.items():
        for name in ("total_token_throughput", "mean_itl_ms", "mean_tpot_ms", "mean_ttft_ms"):
            for what in ("smape_percent", "repeatability_percent"):
                values = [r["figures"][name][what] for r in members if r["figures"][name][what] is not None]
                found[f"{group}_{name}_{what}"] = float(np.mean(values)) if values else None
    found["starvation_right"] = f"{sum(r['starved'][0] == r['starved'][1] for r in ran)}/{len(ran)}"
    right = sum(r["memory_error"][0] == r["memory_error"][1] for r in rows)
    found["memory_error_right"] = f"{right}/{len(rows)}"
    return found


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table for people."""
    names = ("total_token_throughput", "mean_itl_ms", "mean_ttft_ms", "preemptions")
    head = ["case", "server", "adapters", "req/s", "starved (twin/real)"]
    head += [f"{name} twin / real (SMAPE %, repeat %)" for name in names]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for r in rows:
        if r["memory_error"][1] or r["memory_error"][0]:
            text = "memory error {} / {}".format(*r["memory_error"])
            cells = [r["case"], f"{r['max_loras']}×{r['max_lora_rank']}", str(r["adapters"]), "", text]
            lines.append("| " + " | ".join(cells + [""] * len(names)) + " |")
            continue
        cells = [r["case"], f"{r['max_loras']}×{r['max_lora_rank']}", str(r["adapters"]), f"{r['rate']:.1f}"]
        cells.append(f"{r['starved'][0]} / {r['starved'][1]}")
        cells += [cell(r["figures"][name]) for name in names]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def cell(figure: dict[str, Any]) -> str:
    """`predicted / measured (error, repeatability)`."""
    known = [v for v in figure["measured"] if v is not None]
    measured = f"{np.mean(known):.1f}" if known else "–"
    predicted = "–" if figure["predicted"] is None else f"{figure['predicted']:.1f}"
    parts = [figure["smape_percent"], figure["repeatability_percent"]]
    tail = ", ".join("–" if p is None else f"{p:.1f}" for p in parts)
    return f"{predicted} / {measured} ({tail})"


def run_plans(launch: Launch, place: Place) -> None:
    """Five solvers' plans for one workload of two servers, on real vLLM."""
    profile = load_profile(place.results / "profile.toml")
    workload = fleet(PLAN_CASE, round(PLAN_CASE.share * largest_rate(PLAN_CASE, profile), 2))
    plans = {}
    for solver in SOLVERS:
        objective, gpus = ("latency", 2) if solver in SPREADING else ("gpus", None)
        try:
            plans[solver] = packer.solve(workload, profile, objective=objective, solver=solver, max_gpus=gpus)
        except packer.PackerError as error:
            say(f"{solver}: {error}")
            continue
        say(f"{solver}: {plans[solver].n_gpus} servers, {plans[solver].status}")
    spec = ValidationSpec(duration_s=place.seconds, seed=2)
    measured = measure_plans(plans, workload, launch, place.work / "plans", spec, progress)
    data = {
        "machine": machine(),
        "rate": workload.rate,
        "offered_tok_s": workload.offered_tok_s,
        "plans": {
            name: {
                "bins": [[len(b.adapters), b.max_loras, b.max_lora_rank] for b in plans[name].bins],
                **asdict(figures_of(reports)[0]),
                "failures": figures_of(reports)[1],
                "offered_tok_s": sum(np.mean([r.simulation.offered_tok_s for r in each.runs]) for each in reports),
                "predicted_token_throughput": sum(
                    each.mean("predicted", "total_token_throughput") or 0.0 for each in reports
                ),
            }
            for name, reports in measured.items()
        },
    }
    write(place, "plans.json", data)


def run_schedule(_launch: Launch, place: Place) -> None:
    """How well the load generator keeps its schedule."""
    write(place, "load_generator.json", {"machine": machine(), **measure_schedule(place.work / "schedule")})


PHASES = {"schedule": run_schedule, "servers": run_servers, "plans": run_plans}


def main() -> None:
    """Run the phases in order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launch", required=True, help="launch file, see `packer live setup-cpu`")
    parser.add_argument("--work", default="build/real_vllm", help="where measurements are kept")
    parser.add_argument("--only", choices=PHASES, help="one phase")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="length of each validation run")
    parser.add_argument("--results", default=str(RESULTS), help="where the figures go")
    arguments = parser.parse_args()
    launch, place = (
        read_launch(arguments.launch),
        Place(Path(arguments.work), Path(arguments.results), arguments.seconds),
    )
    for folder in (place.work, place.results):
        folder.mkdir(parents=True, exist_ok=True)
    for name in [arguments.only] if arguments.only else list(PHASES):
        say(f"== {name}")
        PHASES[name](launch, place)


if __name__ == "__main__":
    main()
