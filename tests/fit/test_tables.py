"""Tables of measurements, and the first fits on them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from packer.engine_spec import EngineSpec
from packer.errors import FileFormatError, ModelError
from packer.fit.memory_fit import fit_loading, fit_memory
from packer.fit.runs import fleet_of, stratified
from packer.fit.step_law import micro_equations, solve
from packer.fit.tables import MeasuredRun, Profiling, read_profiling, read_rows, read_runs
from packer.io.tables import Row
from packer.profile import LatencySpec, ModelSpec

MODEL = ModelSpec("m", 1e10, 1000.0, 5e6)
ENGINE = EngineSpec("vllm", "x", 1000, 2048, 256)
RUNS = """run_id,model,family,max_loras,n_adapters,max_lora_rank,rate_counts,size_counts,total_tok_s,status
r0,m,f,8,4,16,0.5:2;0.1:2,8:1;16:3,400,ok
r1,m,g,8,2,16,0.5:2,16:2,,oom
r2,other,g,8,2,16,0.5:2,16:2,400,ok
"""


def test_runs_are_read_with_their_adapters(tmp_path: Path) -> None:
    """Counts of rates and ranks become one entry per adapter; other models are left out."""
    path = tmp_path / "runs.csv"
    path.write_text(RUNS)
    runs = read_runs(path, "m", generated_share=0.5)
    assert [run.run_id for run in runs] == ["r0", "r1"]
    assert sorted(runs[0].rates.tolist()) == [0.1, 0.1, 0.5, 0.5]
    assert sorted(runs[0].ranks.tolist()) == [8, 16, 16, 16]
    assert runs[0].mean_output_tokens == pytest.approx(98.0)
    assert not runs[1].ok
    assert fleet_of(runs[0]).offered_tok_s == pytest.approx(runs[0].offered_tok_s)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (RUNS.replace("total_tok_s", "tokens"), "missing: total_tok_s"),
        (RUNS.replace("0.5:2;0.1:2", "0.5x2"), "value:count"),
        (RUNS.replace("0.5:2;0.1:2", "0.5:99999999999"), "at most 1,000,000 adapters"),
        (RUNS.replace("r0,m,f,8,4", "r0,m,f,,4"), "a number, got an empty cell"),
        (RUNS.replace("r0,m,f,8,4", "r0,m,f,8.5,4"), "a whole number"),
        (RUNS.replace(",400,ok", ",400,ok,x", 1), "10 cells as in the header, got 11"),
        (RUNS.replace(",400,ok", ",,ok", 1), "throughput of a run"),
        (RUNS.replace("8:1;16:3,400,ok", ""), "10 cells as in the header, got 8"),
        (RUNS.replace(",400,ok", ",many,ok"), "a number, got 'many'"),
        (
            RUNS.replace("f,8,4,16", "f,8,5,16"),
            "row 2, column 'n_adapters': expected as many adapters as rates, 4, and",
        ),
        (
            RUNS.replace("8:1;16:3", "8:1;16:1"),
            "column 'n_adapters': expected as many adapters as rates, 4, and ranks, 2",
        ),
        (RUNS.replace("0.5:2;0.1:2", "0:4"), "row 2, column 'rate_counts': expected a rate above 0, got '0:4'"),
        (RUNS.replace("f,8,4,16", "f,8,4,8"), "row 2, column 'max_lora_rank': expected at least the largest rank, 16"),
        (
            RUNS.replace("f,8,4,16", "f,0,4,16"),
            "row 2, column 'max_loras': expected at least 1 slot for adapters, got 0",
        ),
        (RUNS.replace(",400,ok", ",inf,ok"), "finite number"),
        (RUNS.replace(",400,ok", ",-400,ok"), "finite number >= 0"),
    ],
)
def test_bad_runs_are_named(tmp_path: Path, bad: str, message: str) -> None:
    """A bad table of runs is refused with the file and what is wrong."""
    path = tmp_path / "runs.csv"
    path.write_text(bad)
    with pytest.raises(FileFormatError, match=message) as error:
        read_runs(path, "m")
    assert "runs.csv" in str(error.value)


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("kv_capacity", "max_loras,max_lora_rank,status,kv_cache_tokens\n1,8,ok,9\n1,8,ok,x", "row 3, column 'kv_c"),
        (
            "kv_capacity",
            "max_loras,max_lora_rank,status,kv_cache_tokens\n1,8,ok,90\n2,16,ok,900\n4,32,ok,9000",
            "row 2, column 'kv_cache_tokens': expected fewer tokens with slots of larger ranks",
        ),
        ("loading", "adapter_rank,gpu_load_mean_ms,disk_load_mean_ms\n8,3,", "row 2, column 'disk_load_mean_ms'"),
        (
            "latency_backbone",
            "decode,1,5,100,-3",
            "row 2, column 'itl_mean_ms': expected a finite number > 0 and <= 1e+15, got '-3'",
        ),
        ("latency_backbone", "decode,1,5,0,3", "row 2, column 'set_output_length': expected a finite number > 0"),
        ("latency_backbone", "Prefill,1,5,1,9", "row 2, column 'phase': expected decode or prefill"),
        ("latency_backbone", "prefill,1,5,1,0", "row 2, column 'duration_s': expected a number, got an empty"),
        ("latency_adapters", "8,,16,4,128,12", "row 2, column 'max_loras': expected a number, got an empty"),
        ("latency_adapters", "8,8,-16,4,128,12", "row 2, column 'rank': expected a finite number > 0"),
        ("latency_adapters", "0,8,16,4,128,12", "row 2, column 'batch': expected a finite number > 0"),
        ("latency_adapters", "8,8,16,0.5,128,12", "row 2, column 'n_adapters': expected a whole number"),
    ],
)
def test_bad_micro_benchmarks_are_named(tmp_path: Path, name: str, rows: str, message: str) -> None:
    """A cell that no measurement gives is refused with its file, row and column; a fit on it would be wrong."""
    heads = {
        "latency_backbone": "phase,set_batch_size,actual_prompt_len,set_output_length,itl_mean_ms\n",
        "latency_adapters": "batch,max_loras,rank,n_adapters,set_output_length,itl_mean_ms\n",
    }
    path = tmp_path / f"{name}.csv"
    path.write_text(heads.get(name, "") + rows + "\n")
    tables = read_profiling(tmp_path, "m")
    fits: dict[str, Callable[[], object]] = {
        "kv_capacity": lambda: fit_memory(tables.kv_capacity, MODEL, ENGINE),
        "loading": lambda: fit_loading(tables.loading),
        **dict.fromkeys(heads, lambda: micro_equations(tables, ENGINE, LatencySpec("linear", {}))),
    }
    with pytest.raises(FileFormatError, match=re.escape(f"{path}, {message}")):
        fits[name]()


def test_an_empty_folder_is_no_profiling(tmp_path: Path) -> None:
    """At least one of the four tables must be there."""
    with pytest.raises(FileFormatError, match=r"kv_capacity\.csv"):
        read_profiling(tmp_path, "m")


def test_a_table_of_other_models_is_named(tmp_path: Path) -> None:
    """A table is not left out because its rows have another model: its file and the models are named."""
    rows = "model,adapter_rank,gpu_load_mean_ms,disk_load_mean_ms\nn,8,3,9\n"
    (tmp_path / "loading.csv").write_text(rows)
    (tmp_path / "kv_capacity.csv").write_text("max_loras,max_lora_rank,status,kv_cache_tokens\n1,8,ok,9\n")
    with pytest.raises(FileFormatError, match=r"loading\.csv: expected rows of model 'm', got rows of 'n'"):
        read_profiling(tmp_path, "m")


def test_measurements_that_failed_are_left_out_and_not_all_of_them(tmp_path: Path) -> None:
    """Loads of a table without a row that is ok do not take no time: the table is refused."""
    table, head = tmp_path / "loading.csv", "adapter_rank,gpu_load_mean_ms,disk_load_mean_ms,status\n"
    table.write_text(head + "8,3,9,ok\n8,,,failed\n")
    assert len(read_profiling(tmp_path, "m").loading) == 1
    table.write_text(head + "8,,,failed\n")
    with pytest.raises(FileFormatError, match=r"loading\.csv: expected a row whose status is ok"):
        read_profiling(tmp_path, "m")


def test_memory_fit_is_exact_on_a_line() -> None:
    """Capacities that follow the model's line give its parameters back."""
    rows = [
        Row(0, {"max_loras": str(s), "max_lora_rank": str(r), "status": "ok",
                "kv_cache_tokens": str(900_000 - 50 * s - 20 * s * r)})
        for s in (8, 32, 128)
        for r in (8, 16, 32)
    ]  # fmt: skip
    memory = fit_memory(rows, MODEL, ENGINE)
    assert memory.kv_budget_bytes == pytest.approx(9e8, rel=1e-6)
    assert memory.slot_bytes == pytest.approx(50_000, rel=1e-3)
    assert memory.slot_bytes_per_rank == pytest.approx(20_000, rel=1e-4)
    assert fit_memory(rows, MODEL, replace(ENGINE, data_parallel_size=2)).min_kv_tokens == 2 * 1008
    with pytest.raises(ModelError, match="at least 3"):
        fit_memory(rows[:2], MODEL, ENGINE)


def test_loading_never_falls_with_the_rank() -> None:
    """Noise that makes large adapters look faster gives a constant, not a negative slope."""
    rows = [
        Row(0, {"adapter_rank": rank, "gpu_load_mean_ms": ms, "disk_load_mean_ms": disk})
        for rank, ms, disk in (("8", "7.5", "70"), ("16", "7.0", "80"), ("32", "6.5", "120"))
    ]
    loading = fit_loading(rows)
    assert (loading.host_base_ms, loading.host_per_rank_ms) == (7.0, 0.0)
    assert loading.disk_per_rank_ms > 0


def test_loading_times_proportional_to_the_rank_keep_their_slope() -> None:
    """Noise that puts the line's start below 0 gives a line through 0, not one time for all ranks."""
    rows = [
        Row(0, {"adapter_rank": str(rank), "gpu_load_mean_ms": str(ms), "disk_load_mean_ms": str(8 * ms)})
        for rank, ms in ((8, 2.8), (16, 5.6), (32, 11.5), (64, 23.5))
    ]
    loading = fit_loading(rows)
    assert (loading.host_base_ms, loading.disk_base_ms) == (0.0, 0.0)
    assert loading.host_per_rank_ms == pytest.approx(0.36, rel=0.02)
    assert loading.disk_per_rank_ms == pytest.approx(2.9, rel=0.02)


def test_micro_benchmarks_give_their_law_back() -> None:
    """Decode rows that follow a law of base and batch give both coefficients."""
    rows = tuple(
        Row(0, {"phase": "decode", "set_batch_size": str(b), "actual_prompt_len": "5", "set_output_length": "100",
                "itl_mean_ms": str(8 + 0.05 * b + 0.01 * 5 * b / 100)})
        for b in (1, 10, 50, 100, 200)
    )  # fmt: skip
    equations = micro_equations(Profiling(backbone=rows), ENGINE, LatencySpec("linear", {}))
    law = solve(equations, ("base_ms", "per_decode_ms"))
    assert law["base_ms"] == pytest.approx(8.0, rel=1e-3)
    assert law["per_decode_ms"] == pytest.approx(0.0505, rel=1e-3)


def test_stratified_spreads_over_families(measured_runs: list[MeasuredRun]) -> None:
    """A small choice holds every family, without repeats."""
    chosen = stratified(measured_runs, 6, 0)
    assert {run.family for run in chosen} == {run.family for run in measured_runs}
    assert len({run.run_id for run in chosen}) == 6
    assert np.isfinite([run.duration_s for run in chosen]).all()


@pytest.mark.parametrize("text", ["a,b\r\rc\n1,2\n", "a,b\n1\r,2\r3\n"])
def test_stray_line_ends_are_refused(tmp_path: Path, text: str) -> None:
    """What the CSV reader can't split, in the header or below, is an error of the file."""
    (tmp_path / "k.csv").write_bytes(text.encode())
    with pytest.raises(FileFormatError, match=r"k\.csv"):
        read_rows(tmp_path / "k.csv", ("a", "b"))
