"""The H100 measurements (../shared/data/h100) as the calibration takes them, and the identity of the servers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from packer.engine_spec import EngineSpec
from packer.fit.tables import MeasuredRun, Profiling, read_profiling, read_rows, read_runs
from packer.profile import FrontEndSpec, GpuSpec, LatencySpec, LoadingSpec, MemorySpec, ModelSpec, Profile

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data" / "h100"
PROFILES = ROOT / "twin" / "profiles" / "h100-64gb"
SCRAPE_INTERVAL_S = 2.0  # pause of the measurements between two polls of /metrics
MAX_OUTSTANDING = 26_800  # the benchmark client's own ceiling
GIB = 2**30

GENERATED_SHARE = {"llama-3.1-8b-instruct": 0.991, "qwen-2.5-7b-instruct": 0.958}
MODELS = tuple(GENERATED_SHARE)


def _lora_bytes_per_rank(hidden: int, intermediate: int, kv: int, layers: int) -> int:
    """Bytes of a bf16 adapter on all seven projections, per unit of rank: Σ (in + out) × 2."""
    attention = 2 * (hidden + hidden) + 2 * (hidden + kv)
    return 2 * layers * (attention + 3 * (hidden + intermediate))


SPECS = {
    "llama-3.1-8b-instruct": (
        ModelSpec(
            "llama-3.1-8b-instruct",
            2 * 8_030_261_248,
            131_072,
            _lora_bytes_per_rank(4096, 14336, 1024, 32),
            "meta-llama/Llama-3.1-8B-Instruct",
        ),
        131_072,
    ),
    "qwen-2.5-7b-instruct": (
        ModelSpec(
            "qwen-2.5-7b-instruct",
            2 * 7_615_616_512,
            57_344,
            _lora_bytes_per_rank(3584, 18944, 512, 28),
            "Qwen/Qwen2.5-7B-Instruct",
        ),
        32_768,
    ),
}


def base_profile(model: str) -> Profile:
    """Identity and settings of the measured servers; nothing fitted."""
    spec, max_model_len = SPECS[model]
    return Profile(
        name=f"h100-64gb/{model}",
        model=spec,
        gpu=GpuSpec("NVIDIA H100 64GB", 64.0 * GIB),
        engine=EngineSpec("vllm", "0.8.5", max_model_len, max_num_batched_tokens=2048, max_num_seqs=2048),
        memory=MemorySpec(0.0, 0.0, 0.0, max_model_len),
        latency=LatencySpec("linear", {}, graph_max_tokens=512),
        loading=LoadingSpec(cold_start=True),
        frontend=FrontEndSpec(scrape_interval_s=SCRAPE_INTERVAL_S),
    )


def tables(model: str, data: Path = DATA) -> tuple[Profiling, list[MeasuredRun]]:
    """Micro-benchmarks and runs of a model."""
    runs = read_runs(data / "runs.csv", model, generated_share=GENERATED_SHARE[model], max_outstanding=MAX_OUTSTANDING)
    scrape_s = {
        row.cells["run_id"]: float(row.cells["poll_s_6"] or "nan")
        for row in read_rows(data / "polls.csv", ("run_id", "poll_s_6"))
    }
    runs = [
        replace(run, metrics={**run.metrics, "scrape_s": scrape_s[run.run_id]})
        if scrape_s.get(run.run_id, 0.0) > 0.0 else run
        for run in runs
    ]  # fmt: skip
    return read_profiling(data, model), runs
