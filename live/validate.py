"""Predicted against measured: one real server per bin, its traffic, and the twin on the same requests."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from packer.bin import Bin
from packer.evaluation import STARVATION_THRESHOLD
from packer.io.files import claimed
from packer.live.calibration import options_for
from packer.live.campaign import Campaign
from packer.live.launch import Launch
from packer.live.metrics import page_of
from packer.live.server import split_cores
from packer.live.task import Outcome, Session, Task
from packer.progress import Progress, silent
from packer.twin.engine_rules import rules_of
from packer.twin.run import Run
from packer.twin.scores import smape
from packer.twin.simulate import simulate
from packer.words import counted, listed
from packer.workload import Workload

Figures = dict[str, float | None]

COMPARED = (
    "total_token_throughput", "mean_ttft_ms", "median_ttft_ms", "mean_tpot_ms", "mean_itl_ms",
    "mean_running", "mean_waiting", "mean_kv_usage", "preemptions", "prefix_hit_rate",
)  # fmt: skip
"""Figures that are compared."""
SMAPE_OF = COMPARED[:5]
FROM_METRICS = COMPARED[5:-1]  # Figures of every server's /metrics page; no hit rate if nothing was looked up.
LOOK_S = 0.5  # Seconds between the main thread's checks for an interrupt.


def difference(predicted: float | None, measured: float | None) -> float | None:
    """SMAPE of one figure, percent; None if a value is missing."""
    if predicted is None or measured is None or math.isnan(predicted) or math.isnan(measured):
        return None
    return smape([(predicted, measured)])


@dataclass(frozen=True, eq=False)
class Repeat:
    """One repeat: what the server did and what the twin predicts for the same requests."""

    outcome: Outcome
    simulation: Run
    measured: Figures
    predicted: Figures

    @property
    def starved(self) -> bool | None:
        """Whether the server starved or lacked memory; None if the run did not complete."""
        if self.outcome.memory_error:
            return True
        load = self.outcome.load
        if load is None or not self.outcome.complete:
            return None
        return load.served_share < STARVATION_THRESHOLD


@dataclass(frozen=True, eq=False)
class BinReport:
    """Predicted against measured for one bin; `repeatability`: SMAPE between measured repeats."""

    index: int
    bin: Bin
    runs: tuple[Repeat, ...]
    errors: Mapping[str, float | None] = field(default_factory=dict)
    repeatability: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def failure(self) -> str | None:
        """Why a repeat did not run to its end, or its server restarted; else None."""
        for run in self.runs:
            if run.outcome.failure is not None:
                return run.outcome.failure.message
            if run.outcome.load is not None and run.outcome.load.fault is not None:
                return run.outcome.load.fault
            if run.outcome.metrics is not None and run.outcome.metrics.restarts:
                return "the server began anew during a run: its counters fell"
        return None

    @property
    def refused(self) -> bool:
        """Whether requests failed and none was answered."""
        loads = [run.outcome.load for run in self.runs if run.outcome.load is not None]
        return bool(self.failed_requests) and not any(len(load.done) for load in loads)

    @property
    def failed_requests(self) -> dict[str, int]:
        """Failed requests of all repeats by message, the most frequent first."""
        loads = [run.outcome.load for run in self.runs if run.outcome.load is not None]
        return dict(sum((Counter(load.errors) for load in loads), Counter()).most_common())

    @property
    def unmeasured(self) -> str | None:
        """Why figures of /metrics have no measured value, though requests were served."""
        served = [run for run in self.runs if run.outcome.load is not None]
        absent = [name for name in FROM_METRICS if all(run.measured.get(name) is None for run in served)]
        if not served or not absent:
            return None
        pages = sum(run.outcome.metrics.samples for run in served if run.outcome.metrics is not None)
        return f"{', '.join(absent)} have no value: {counted(pages, 'page')} of /metrics had figures of vLLM"

    @property
    def memory_error(self) -> tuple[bool, bool]:
        """(predicted, measured)."""
        predicted = any(run.simulation.status == "memory_error" for run in self.runs)
        return predicted, any(run.outcome.memory_error for run in self.runs)

    @property
    def starved(self) -> tuple[bool, bool | None]:
        """(predicted, measured), by the means over the repeats; measured is None if no repeat completed."""
        known = [run.starved for run in self.runs if run.starved is not None]
        predicted = float(np.mean([run.simulation.starved for run in self.runs])) > 0.5
        return predicted, (float(np.mean(known)) > 0.5 if known else None)

    @property
    def interrupted(self) -> bool:
        """Whether some repeat is partial."""
        return any(run.outcome.interrupted for run in self.runs)

    def mean(self, side: str, name: str) -> float | None:
        """Mean of a figure over the repeats; `side` is "measured" or "predicted"."""
        values = [getattr(run, side).get(name) for run in self.runs]
        known = [v for v in values if v is not None and math.isfinite(v)]
        return float(np.mean(known)) if known else None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        starved, memory = self.starved, self.memory_error
        return {
            "gpu": self.index,
            "adapters": len(self.bin.adapters),
            "max_loras": self.bin.max_loras,
            "max_lora_rank": self.bin.max_lora_rank,
            "failure": self.failure,
            "unmeasured": self.unmeasured,
            "partial": self.interrupted,
            "memory_error": {"predicted": memory[0], "measured": memory[1]},
            "starved": {"predicted": starved[0], "measured": starved[1]},
            "figures": {
                name: {
                    "predicted": self.mean("predicted", name),
                    "measured": self.mean("measured", name),
                    "smape_percent": self.errors.get(name),
                    "repeatability_percent": self.repeatability.get(name),
                }
                for name in COMPARED
            },
            "runs": [
                run.outcome.load.to_bench(seed=run.outcome.task.seed) if run.outcome.load else None for run in self.runs
            ],
            "log_tail": next((r.outcome.failure.tail for r in self.runs if r.outcome.failure), ""),
        }


@dataclass(frozen=True)
class ValidationSpec:
    """How to measure. `parallel` servers run at once; `gpus` are divided among them."""

    duration_s: float = 120.0
    repeats: int = 1
    parallel: int = 1
    seed: int = 0
    gpus: tuple[int, ...] = ()


class Validation:
    """Measures bins on real servers; partial results survive an interrupt in `reports`. `numbers`: of the bins in the
    plan, by default 0, 1, …. `keys` name the bins' folders below `folder`, by default gpu-NUMBER."""

    def __init__(
        self, launch: Launch, fleet: Workload, bins: Sequence[Bin], folder: Path, spec: ValidationSpec,
        progress: Progress = silent, keys: Sequence[str] = (), numbers: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.numbers = numbers or range(len(bins))
        self.keys = tuple(keys) or tuple(f"gpu-{number}" for number in self.numbers)
        self.launch, self.fleet, self.bins = launch, fleet, tuple(bins)
        self.folder, self.spec, self.progress = folder, spec, progress
        self.reports: list[BinReport] = []
        self._stop = threading.Event()

    def run(self) -> list[BinReport]:
        """Measure all bins; return their reports in order. An interrupt stops the servers before it is raised. Raises
        `OutputError`: another process measures into the same folder."""
        places = split_cores(self.launch.server_cores, self.spec.parallel)
        free: SimpleQueue[int] = SimpleQueue()
        for place in range(self.spec.parallel):
            free.put(place)
        lock = threading.Lock()

        def one(index: int) -> None:
            place = free.get()
            try:
                outcomes = self._campaign(place, places[place]).run([self.session(index)])
                report = report_of(self.numbers[index], self.bins[index], outcomes, self.launch)
                with lock:
                    self.reports.append(report)
                    self.reports.sort(key=lambda r: r.index)
                    self.progress(f"server {report.index}", len(self.reports), len(self.bins))
            finally:
                free.put(place)

        with claimed(self.folder):
            pool = ThreadPoolExecutor(self.spec.parallel)
            left = {pool.submit(one, index) for index in range(len(self.bins))}
            try:
                while left:  # an interrupt that comes just before the wait is seen after it
                    done, left = wait(left, LOOK_S, FIRST_COMPLETED)
                    for future in done:
                        future.result()  # raises the first error of a thread
            except BaseException:
                self._stop.set()
                raise
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
        return self.reports

    @property
    def differing(self) -> list[str]:
        """Settings of the launch file other than those of the bins, for which is predicted, in words."""
        ours, found = self.launch.engine, set[str]()
        for theirs in {item.profile.engine for item in self.bins}:
            usual = rules_of(replace(theirs, prefix_caching=None, async_scheduling=None))
            for name in (each.name for each in fields(theirs)):
                given = (getattr(each, name) for each in (ours, theirs))
                values = [getattr(usual, name, None) if value is None else value for value in given]
                if values[0] not in (values[1], "unknown"):
                    found.add(f"{name} {' instead of '.join(map(_in_words, values))}")
        return sorted(found)

    @property
    def complete(self) -> bool:
        """Whether every repeat of every bin ran to its end or to a failure of its own."""
        whole = [r for r in self.reports if len(r.runs) == self.spec.repeats and not r.interrupted]
        return len(whole) == len(self.bins)

    def _campaign(self, place: int, cores: tuple[int, ...]) -> Campaign:
        launch, each = self.launch, self.launch.engine.gpus
        if self.spec.gpus:
            mine = self.spec.gpus[place * each : (place + 1) * each]
            visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, mine))}
            launch = replace(launch, environment={**launch.environment, **visible})
        say = self.progress if self.spec.parallel == 1 else silent
        return Campaign(launch, self.folder, cores=cores, progress=say, stop=self._stop.is_set)

    def session(self, index: int) -> Session:
        """The server of a bin and its repeats."""
        bin_ = self.bins[index]
        traffic = bin_.workload(self.fleet)
        options = options_for(self.launch, traffic.adapters, bin_.settings)
        spec = self.spec
        tasks = [Task(f"repeat-{k}", traffic, spec.duration_s, spec.seed + k) for k in range(spec.repeats)]
        return Session(self.keys[index], options, tuple(tasks))


def report_of(index: int, bin_: Bin, outcomes: Sequence[Outcome], launch: Launch) -> BinReport:
    """Predict each outcome's requests with the bin's profile and compare."""
    runs = tuple(_run(bin_, outcome, launch) for outcome in outcomes)
    one = BinReport(index, bin_, runs)
    errors = {name: difference(one.mean("predicted", name), one.mean("measured", name)) for name in SMAPE_OF}
    return replace(one, errors=errors, repeatability={name: _repeatability(runs, name) for name in SMAPE_OF})


def _run(bin_: Bin, outcome: Outcome, launch: Launch) -> Repeat:
    duration_s = (outcome.load or outcome.task).duration_s
    sent = outcome.task.replayed(launch.engine.max_model_len)
    given = {**asdict(bin_.settings), "duration_s": duration_s, "timeline_bin_s": max(1.0, duration_s / 60.0)}
    simulation = simulate(sent, bin_.profile, **given)
    predicted: Figures = {name: _known(getattr(simulation, name)) for name in COMPARED}
    return Repeat(outcome, simulation, measured_figures(outcome), predicted)


def measured_figures(outcome: Outcome) -> Figures:
    """Return the compared figures of one run; None for a figure without a measured value."""
    load, metrics = outcome.load, outcome.metrics
    if load is None:
        return dict.fromkeys(COMPARED)
    summary = load.summary()
    figures: Figures = {name: summary.get(name) for name in SMAPE_OF}
    # The twin's gap is per token; a late server sends several in one chunk, which the client sees as one gap.
    figures["mean_itl_ms"] = _known(load.mean_gap_ms)
    for name in COMPARED[5:]:
        figures[name] = getattr(metrics, name) if metrics is not None else None
    return figures


def _in_words(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return (listed(value) if isinstance(value, tuple) else str(value or "")) or "unset"


def _known(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _repeatability(runs: Sequence[Repeat], name: str) -> float | None:
    """Return the mean SMAPE of one figure over all pairs of repeats; None with fewer than two repeats."""
    values = [run.measured.get(name) for run in runs]
    pairs = [difference(a, b) for i, a in enumerate(values) for b in values[i + 1 :]]
    known = [p for p in pairs if p is not None]
    return float(np.mean(known)) if known else None


def gauges(outcome: Outcome) -> dict[str, list[float]]:
    """Return time_s, running, waiting, kv_usage of a run's /metrics pages; NaN for a missing figure."""
    texts = outcome.load.metrics if outcome.load is not None else ()
    pages = [page_of(text, time_s) for time_s, text in texts if text]
    columns: dict[str, list[float]] = {"time_s": [page.time_s for page in pages]}
    for name in ("running", "waiting", "kv_usage"):
        columns[name] = [page.figures.get(name, math.nan) for page in pages]
    return columns
