"""Measurements as tables: micro-benchmarks of a server, and whole runs with their metrics."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from packer import checks
from packer.arrays import FloatArray, IntArray
from packer.errors import FileFormatError, reader, shown
from packer.io.files import read_text
from packer.io.tables import Row, csv_rows
from packer.words import listed
from packer.workload import SHAREGPT_CORRELATION

MOST_ADAPTERS = 1_000_000  # Maximum number of adapters of a run.
MOST = 1e15  # Maximum of every figure.


@reader
def read_rows(path: str | os.PathLike[str], required: Sequence[str]) -> list[Row]:
    """Rows of a CSV file (also gzip) as text by column; raises `FileFormatError`."""
    found, rows = csv_rows(read_text(path))
    missing = [name for name in required if name not in found]
    if missing:
        rule = f"expected the columns {', '.join(required)}; missing: {', '.join(missing)}"
        raise FileFormatError(f"{rule}; found: {', '.join(found)[:200]}.", row=1)
    return [replace(row, path=path) for row in rows]


def number(row: Row, column: str, *, default: float = math.nan) -> float:
    """A number >= 0 of a row; `default` if the cell is blank."""
    return default if row.is_blank(column) else row.real(column, low=0.0, high=MOST)


def positive(row: Row, column: str, *, default: float = 0.0) -> float:
    """A number > 0 of a row; a blank cell is `default`, or an error if that is 0."""
    if default and row.is_blank(column):
        return default
    return row.real(column, low=0.0, high=MOST, open_low=True)


def whole(row: Row, column: str) -> int:
    """A whole number of a row."""
    return row.integer(column, low=0, high=int(MOST))


@dataclass(frozen=True)
class Profiling:
    """Micro-benchmarks of one model: rows of the four tables, each may be empty."""

    kv_capacity: tuple[Row, ...] = ()
    backbone: tuple[Row, ...] = ()
    adapters: tuple[Row, ...] = ()
    loading: tuple[Row, ...] = ()


def read_profiling(directory: str | os.PathLike[str], model: str) -> Profiling:
    """Read a model's micro-benchmarks from tables in a directory; an absent table is empty. Rows that are not "ok" are
    left out. Raises `FileFormatError`: no table has rows, or one has rows of other models only, none ok, or lacks
    columns."""
    folder = Path(directory)
    answers = ("set_output_length", "itl_mean_ms")
    required = {
        "kv_capacity.csv": ("max_loras", "max_lora_rank", "status", "kv_cache_tokens"),
        "latency_backbone.csv": ("phase", "set_batch_size", "actual_prompt_len", *answers),
        "latency_adapters.csv": ("batch", "max_loras", "rank", "n_adapters", *answers),
        "loading.csv": ("adapter_rank", "gpu_load_mean_ms", "disk_load_mean_ms"),
    }
    tables: list[tuple[Row, ...]] = []
    for name, columns in required.items():
        rows = read_rows(folder / name, columns) if (folder / name).exists() else []
        tables.append(tuple(row for row in rows if row.cells.get("model", model) == model))
        if rows and not tables[-1]:
            others = listed(map(shown, sorted({row.cells["model"] for row in rows})), 3)
            rule = f"expected rows of model {model!r}, got rows of {others} (--model says which are read)."
            raise FileFormatError(rule, path=folder / name)
        tables[-1] = tuple(row for row in tables[-1] if (row.cells.get("status") or "ok").strip() == "ok")
        if rows and not tables[-1]:
            raise FileFormatError("expected a row whose status is ok.", path=folder / name)
    if not any(tables):
        rule = f"expected at least one of {', '.join(required)} with rows of model {model!r}."
        raise FileFormatError(rule, path=folder)
    return Profiling(*tables)


@dataclass(frozen=True, eq=False)
class MeasuredRun:
    """One run of a real server: its inputs and measured metrics; a metric that was not measured is absent.
    `max_outstanding`: maximum number of outstanding requests of the client, if it had one."""

    run_id: str
    family: str
    rates: FloatArray
    ranks: IntArray
    max_loras: int
    max_lora_rank: int
    duration_s: float
    mean_input_tokens: float
    mean_output_tokens: float
    status: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    length_correlation: float = SHAREGPT_CORRELATION
    max_outstanding: int | None = None

    @property
    def ok(self) -> bool:
        """Whether the server started."""
        return self.status == "ok"

    @property
    def timed(self) -> bool:
        """Whether the server started and the mean time of its steps is known, by TPOT and request throughput."""
        return self.ok and all(self.metrics.get(name) for name in ("tpot_mean_ms", "request_throughput"))

    @property
    def offered_tok_s(self) -> float:
        """Offered load, tok/s."""
        return float(self.rates.sum() * (self.mean_input_tokens + self.mean_output_tokens))

    @property
    def starved(self) -> bool:
        """Throughput below 0.9 of the offered load."""
        return self.metrics["total_tok_s"] < 0.9 * self.offered_tok_s

    @property
    def regime(self) -> str:
        """ "starved", "queueing" (not starved, 5 or more requests waiting on average) or "light"."""
        if self.starved:
            return "starved"
        return "light" if self.metrics.get("mean_num_waiting", 0.0) < 5 else "queueing"


METRICS = ("total_tok_s", "ttft_mean_ms", "ttft_median_ms", "tpot_mean_ms", "itl_mean_ms", "request_throughput",
           "mean_num_running", "mean_num_waiting", "mean_kv_usage", "preemptions_total")  # fmt: skip
REQUIRED = ("model", "max_loras", "n_adapters", "max_lora_rank", "rate_counts", "size_counts", "total_tok_s")


@reader
def read_runs(
    path: str | os.PathLike[str], model: str, *, generated_share: float = 1.0, max_outstanding: int | None = None
) -> list[MeasuredRun]:
    """Read a model's runs from runs.csv, and adapters' rates from adapters.csv(.gz) in the same folder if it is there.

    `generated_share`: generated / requested output tokens. `max_outstanding`: the client's limit. Runs record only the
    number of adapters of each rank, so ranks are assigned at random (seed 0).
    """
    measured = _rates_by_run(Path(path).parent)
    runs: list[MeasuredRun] = []
    for row in read_rows(path, REQUIRED):
        if row.cells["model"] != model:
            continue
        run_id = row.cells.get("run_id") or str(len(runs))
        rates = measured.get(run_id)
        if rates is None:
            rates = _expand(row, "rate_counts")
            np.random.default_rng(1).shuffle(rates)
        slots, slot_rank = whole(row, "max_loras"), whole(row, "max_lora_rank")
        ranks = _expand(row, "size_counts").astype(np.int64)
        _check_adapters(row, rates, ranks, slots, slot_rank)
        np.random.default_rng(0).shuffle(ranks)
        status = (row.cells.get("status") or "ok").strip()
        metrics = {name: value for name in METRICS if not math.isnan(value := number(row, name))}
        if status == "ok" and "total_tok_s" not in metrics:
            row.fail("total_tok_s", "expected the throughput of a run that is ok, got an empty cell.")
        duration_s = positive(row, "total_time_s", default=3600.0)
        inputs = positive(row, "pool_mean_input_tokens", default=223.0)
        outputs = positive(row, "pool_mean_output_tokens", default=196.0) * generated_share
        runs.append(
            MeasuredRun(
                run_id, row.cells.get("family") or "all", rates, ranks, slots, slot_rank, duration_s, inputs, outputs,
                status, metrics, max_outstanding=max_outstanding,
            )
        )  # fmt: skip
    if not runs:
        raise FileFormatError(f"expected runs of model {model!r}, found none.")
    return runs


def _expand(row: Row, column: str) -> FloatArray:
    """ "0.1:43;0.05:42" → 43 times 0.1, then 42 times 0.05."""
    values: list[float] = []
    try:
        for item in row.cells[column].split(";"):
            value, count = map(checks.decimal, item.split(":"))
            room = MOST_ADAPTERS - len(values)
            if not (0 <= count <= room and count.is_integer() and 0.0 <= value < math.inf):
                raise ValueError
            values += [value] * int(count)
    except ValueError:
        row.fail(
            column,
            f"expected value:count;value:count… of at most {MOST_ADAPTERS:,} adapters, got {shown(row.cells[column])}.",
        )
    return np.array(values)


def _check_adapters(row: Row, rates: FloatArray, ranks: IntArray, slots: int, slot_rank: int) -> None:
    """Fail unless the row's adapters are as many by rates as by ranks, send requests, and fit into its slots."""
    n, largest = whole(row, "n_adapters"), int(ranks.max(initial=0))
    if not n == len(rates) == len(ranks):
        row.fail("n_adapters", f"expected as many adapters as rates, {len(rates)}, and ranks, {len(ranks)}, got {n}.")
    if not rates.sum() > 0.0:
        row.fail("rate_counts", f"expected a rate above 0, got {shown(row.cells['rate_counts'])}.")
    if largest > slot_rank:
        row.fail("max_lora_rank", f"expected at least the largest rank, {largest}, got {slot_rank}.")
    if largest and not slots:
        row.fail("max_loras", "expected at least 1 slot for adapters, got 0.")


def _rates_by_run(folder: Path) -> dict[str, FloatArray]:
    for name in ("adapters.csv.gz", "adapters.csv"):
        path = folder / name
        if path.exists():
            rates: dict[str, list[float]] = {}
            for row in read_rows(path, ("run_id", "rate")):
                rates.setdefault(row.cells["run_id"], []).append(number(row, "rate"))
            return {run_id: np.array(values) for run_id, values in rates.items()}
    return {}
