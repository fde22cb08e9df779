"""Loads of adapters per request on real vLLM, with its eviction and with one that spares the batch.

    python benchmarks/real_vllm/slots.py --launch vllm-cpu/launch.toml            # all; about 16 minutes
    python benchmarks/real_vllm/slots.py --launch vllm-cpu/launch.toml --servers 2  # at most two more servers

A server's figures are kept in --work and are not measured again. Results: results/slots.json, results/slots.md.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from packer import Adapter, Lengths, Workload, settings
from packer.arrival import RequestTrace
from packer.live import inside
from packer.live.launch import Launch, read_launch
from packer.live.load import LoadJob, run_job
from packer.live.results import LoadResult, read_result
from packer.live.server import LiveServer, ServerOptions
from packer.live.step_log import Steps, read_steps
from packer.testing.records import record_text
from packer.twin.arrivals import draw_requests

sys.path.insert(0, str(Path(__file__).parent))
from machine import machine
from slot_walk import Prediction, Slots, StepLaw, in_fixed_order, in_set_order, predict, read_walks, replay

RESULTS = Path(__file__).parent / "results"
PLUGINS = Path(__file__).parent / "plugins"
RANK = 8
ADAPTERS = 240
KV_CACHE_BYTES = 64_000_000
INPUT, OUTPUT = Lengths.gamma(32.0, 0.6, high=100), Lengths.gamma(48.0, 0.6, high=100)
SETTLE_S = 5.0
SEEDS = 5
"""Orders of the walk that are tried; the median is reported."""


@dataclass(frozen=True)
class Place:
    """Where measurements are kept, and how long a load lasts."""

    work: Path
    results: Path
    seconds: float


@dataclass(frozen=True)
class ServerCase:
    """One server. `host`: adapters kept in CPU memory (`max_cpu_loras`); `sparing`: with the plug-in spare_batch."""

    slots: int
    host: int
    sparing: bool

    @property
    def key(self) -> str:
        """Name of the server's folder."""
        return f"slots{self.slots}-host{self.host}-{'sparing' if self.sparing else 'vllm'}"


CASES = tuple(
    ServerCase(slots, host, sparing)
    for slots, host in ((16, ADAPTERS), (32, ADAPTERS), (16, 16))
    for sparing in (False, True)
)
RATES = (6.0, 20.0, 40.0)


def launch_of(launch: Launch, case: ServerCase, folder: Path) -> Launch:
    """The launch file with the case's plug-ins and registry, without vLLM's own statistics."""
    plugins = ["walk_log", *(["spare_batch"] if case.sparing else [])]
    environment = {
        "PYTHONPATH": os.pathsep.join([str(PLUGINS), str(Path(inside.__file__).parent)]),
        "VLLM_PLUGINS": ",".join(plugins),
        "PACKER_WALK_LOG": str((folder / "walks.txt").resolve()),
    }
    return replace(
        launch,
        engine=replace(launch.engine, max_cpu_loras=case.host),
        arguments=(*launch.arguments, "--disable-log-stats"),
        environment={**launch.environment, **environment},
    )


def fleet(rate: float) -> Workload:
    """`ADAPTERS` adapters of equal rate."""
    adapters = [Adapter(f"a{i}", RANK, rate / ADAPTERS) for i in range(ADAPTERS)]
    return Workload(adapters, INPUT, OUTPUT, 0.0)


def measure(launch: Launch, case: ServerCase, place: Place) -> None:
    """Start the server and send each load; everything stays in its folder."""
    folder = place.work / case.key
    folder.mkdir(parents=True, exist_ok=True)
    launch = launch_of(launch, case, folder)
    names = fleet(1.0).names
    adapters = tuple((name, launch.adapter_folder(name, RANK)) for name in names)
    options = ServerOptions(adapters, settings.Settings(case.slots, RANK), KV_CACHE_BYTES)
    with LiveServer(launch, options, folder) as server:
        failure = server.start()
        if failure is not None:
            raise SystemExit(f"{case.key}: {failure.message}\n{failure.tail}")
        for seed, rate in enumerate(RATES):
            job = LoadJob(
                server.url,
                tuple(names),
                draw_requests(fleet(rate), place.seconds, seed),
                place.seconds,
                token_ids=launch.token_ids,
                seed=seed,
                metrics_interval_s=0.0,
                cores=launch.client_cores,
            )
            load = run_job(job, folder / f"rate-{rate:g}", alive=lambda: server.alive)
            if not load.complete:
                raise SystemExit(f"{case.key} at {rate:g} req/s: {load.ended}")
    (folder / "done").touch()


def rows_of(launch: Launch, case: ServerCase, place: Place) -> list[dict[str, Any]]:
    """A row per load of a measured server."""
    folder = place.work / case.key
    walks, steps = read_walks(folder / "walks.txt"), read_steps(folder / "steps.csv")
    slots = {"slots": case.slots, "host": case.host, "sparing": case.sparing}
    exact = replay(walks, Slots(**slots))
    other = [replay(in_set_order(walks, seed), Slots(**slots)) for seed in range(SEEDS)]
    fixed = [replay(in_fixed_order(walks, seed), Slots(**slots)) for seed in range(SEEDS)]
    rows = []
    for rate in RATES:
        load = read_result(folder / f"rate-{rate:g}" / "load.npz")
        start_s, end_s = load.started_monotonic_s, load.started_monotonic_s + load.duration_s
        kept = np.array([start_s <= walk.start_s < end_s for walk in walks])
        mine = [walk for walk, keep in zip(walks, kept, strict=True) if keep]
        measured = np.array([(len(w.activated), len(w.loaded)) for w in walks])[kept]
        inside_run = steps.where((steps.start_s >= start_s) & (steps.start_s < end_s))
        rows.append(
            {
                **asdict(case),
                "rate": rate,
                "offered_tok_s": load.offered_tok_s,
                "throughput_tok_s": load.total_token_throughput,
                "completed": len(load.done),
                "median_itl_ms": float(np.median(load.itl_ms)),
                "mean_ttft_ms": float(np.mean(load.ttft_ms)),
                "steps": len(mine),
                "adapters_per_step": float(np.mean([len(w.order) for w in mine])),
                "loads": int(measured[:, 0].sum()),
                "disk_loads": int(measured[:, 1].sum()),
                "steps_replayed_exactly": int((np.array(exact)[kept] == measured).all(axis=1).sum()),
                "replayed_in_set_order": median_loads(other, kept),
                "replayed_in_fixed_order": median_loads(fixed, kept),
                **timing(inside_run, load.duration_s),
                "predicted": predicted(case, load, inside_run, launch),
                "predicted_sparing": predicted(replace(case, sparing=True), load, inside_run, launch),
            }
        )
    return rows


def median_loads(replays: list[list[tuple[int, int]]], kept: npt.NDArray[np.bool_]) -> float:
    """Median over replays of the loads into slots in the steps kept."""
    return float(np.median([np.array(counts)[kept, 0].sum() for counts in replays]))


def timing(steps: Steps, duration_s: float) -> dict[str, float]:
    """Median step, ms, and the share of the run spent on loads."""
    loads_ms = float((steps.host_ms + steps.disk_ms).sum())
    return {
        "median_step_ms": float(np.nanmedian(steps.periods_ms())),
        "share_in_loads": loads_ms / (duration_s * 1e3),
        "host_ms_per_load": float(steps.host_ms.sum() / max(steps.host_loads.sum(), 1.0)),
        "disk_ms_per_load": float(steps.disk_ms.sum() / max(steps.disk_loads.sum(), 1.0)),
    }


def law_of(steps: Steps, start_s: float, duration_s: float) -> tuple[StepLaw, list[float]]:
    """The run's own law of a step, and how much longer the steps of each second were than it says."""
    period = steps.periods_ms()
    known = np.isfinite(period)
    tokens = steps.decodes + steps.prefill_tokens
    columns = (np.ones(len(steps)), tokens, steps.adapters, steps.host_loads, steps.disk_loads)
    table, period = np.column_stack(columns)[known], period[known]
    scale = np.maximum(table.max(axis=0), 1e-9)
    coefficients, _ = nnls(table / scale / period[:, None], np.ones(len(period)))
    second = (steps.start_s[known] - start_s).astype(np.int64)
    by_law = np.bincount(second, table @ (coefficients / scale), minlength=int(duration_s))
    measured = np.bincount(second, period, minlength=int(duration_s))
    slowdown = np.where(by_law > 0.0, measured / np.maximum(by_law, 1e-9), 1.0)
    return StepLaw(*(coefficients / scale).tolist()), slowdown.tolist()


def predicted(case: ServerCase, load: LoadResult, steps: Steps, launch: Launch) -> dict[str, Any]:
    """Medians over seeds of the simulated run; `law` is the step law that was used, apart from the slowdown."""
    law, slowdown = law_of(steps, load.started_monotonic_s, load.duration_s)
    requests = RequestTrace(load.scheduled_s, load.adapter, load.input_tokens, load.output_tokens)
    runs: list[Prediction] = []
    for seed in range(SEEDS):
        slots = Slots(case.slots, case.host, case.sparing)
        for adapter in range(ADAPTERS):  # as at start-up
            slots.step([adapter])
        runs.append(
            predict(
                requests,
                slots,
                law,
                duration_s=load.duration_s,
                max_num_seqs=launch.engine.max_num_seqs,
                max_num_batched_tokens=launch.engine.max_num_batched_tokens,
                slowdown=slowdown,
                seed=seed,
            )
        )
    medians = {f.name: float(np.median([getattr(run, f.name) for run in runs])) for f in fields(Prediction)}
    return {**medians, "law": asdict(law)}


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table for people."""
    head = ["slots", "host", "eviction", "req/s", "adapters/step", "loads/request", "replayed", "predicted"]
    head += ["from disk", "time in loads", "throughput, tok/s", "sparing, predicted"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for r in sorted(rows, key=lambda r: (r["host"] < ADAPTERS, r["slots"], r["rate"], r["sparing"])):
        done = max(r["completed"], 1)
        cells = [
            str(r["slots"]),
            str(r["host"]),
            "sparing" if r["sparing"] else "vLLM",
            f"{r['rate']:g}",
            f"{r['adapters_per_step']:.1f}",
            f"{r['loads'] / done:.2f}",
            f"{r['replayed_in_set_order'] / done:.2f}",
            f"{r['predicted']['loads'] / max(r['predicted']['completed'], 1.0):.2f}",
            f"{100 * r['disk_loads'] / max(r['loads'], 1):.0f} %",
            f"{100 * r['share_in_loads']:.0f} %",
            f"{r['throughput_tok_s']:,.0f}",
            "" if r["sparing"] else f"{r['predicted_sparing']['tokens'] / r['predicted']['tokens'] - 1:+.1%}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure what is missing and write the results of all servers measured so far."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launch", required=True, help="launch file, see `packer live setup-cpu`")
    parser.add_argument("--work", default="build/real_vllm/slots", help="where measurements are kept")
    parser.add_argument("--results", default=str(RESULTS), help="where the figures go")
    parser.add_argument("--seconds", type=float, default=40.0, help="length of each load")
    parser.add_argument("--servers", type=int, default=len(CASES), help="start at most so many servers")
    arguments = parser.parse_args()
    place = Place(Path(arguments.work), Path(arguments.results), arguments.seconds)
    launch = read_launch(arguments.launch)
    rows: list[dict[str, Any]] = []
    left = arguments.servers
    for case in CASES:
        done = place.work / case.key / "done"
        if not done.exists() and left > 0:
            left -= 1
            print(f"{case.key}: measuring", flush=True)
            measure(launch, case, place)
        if done.exists():
            rows += rows_of(launch, case, place)
    place.results.mkdir(parents=True, exist_ok=True)
    (place.results / "slots.json").write_text(record_text({"machine": machine(), "rows": rows}) + "\n", "utf-8")
    (place.results / "slots.md").write_text(markdown(rows))
    print(markdown(rows))


if __name__ == "__main__":
    main()
