"""Adapter loads per request, predicted against measured: `uv run python benchmarks/fidelity/loads.py` (half a minute).

Reads ../shared/data/h100/loads.csv: Llama-2-7b on vLLM 0.5.0, 300 s a run, every adapter at 0.0125 req/s. The twin
gets what the file says of the server (KV blocks, `max_cpu_loras`), the mean time of a load, and a step law of three
terms, fitted to the time per token of the runs with other numbers of slots; it does not see what was loaded. vLLM 0.5.0
keeps slots as later versions do, but runs prefills in steps of their own: the adapters that join are touched one step
before those that run (`packer.twin.engine_rules`), which doubles the loads.

Loads at start-up, one per slot, belong to the engine and are not counted. Slots are saturated where the distinct
adapters in the batch are at least 0.8 of them.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from h100 import DATA

from packer.adapter import Adapter
from packer.engine_spec import EngineSpec
from packer.fit.step_law import Equations, solve
from packer.io.files import write_text
from packer.lengths import Lengths
from packer.profile import GpuSpec, LatencySpec, LoadingSpec, MemorySpec, ModelSpec, Profile
from packer.terms import LINEAR_TERMS
from packer.testing.records import record_text
from packer.twin.simulate import simulate
from packer.workload import Workload

HERE = Path(__file__).parent
KV_BYTES_PER_TOKEN = 2 * 2 * 32 * 4096
BLOCK_SIZE = 16
RANK = 16
INPUT_TOKENS, OUTPUT_TOKENS = 250, 231
SATURATED = 0.8
SEEDS = 3
TERMS = ("base_ms", "per_decode_ms", "per_adapter_ms")

Row = dict[str, float]


def read() -> list[Row]:
    """The runs, numbers as numbers."""
    with (DATA / "loads.csv").open() as file:
        return [{key: float(value) for key, value in row.items() if key != "family"} for row in csv.DictReader(file)]


def is_saturated(row: Row) -> bool:
    """Whether the batch takes nearly all slots."""
    return row["mean_adapters_in_batch"] >= SATURATED * row["max_loras"]


def equations(rows: list[Row]) -> Equations:
    """Time per token without loads, and the mean state that it belongs to."""
    features = np.zeros((len(rows), len(LINEAR_TERMS)))
    step_ms = np.zeros(len(rows))
    for i, row in enumerate(rows):
        loading = (row["host_load_s"] + row["disk_load_s"]) / row["duration_s"]
        step_ms[i] = row["mean_tpot_ms"] * (1.0 - loading)
        state = (1.0, row["mean_running_late"], row["mean_adapters_in_batch"])
        for term, value in zip(TERMS, state, strict=True):
            features[i, LINEAR_TERMS.index(term)] = value
    return Equations(features, step_ms, np.ones(len(rows)))


def profile_of(row: Row, others: list[Row]) -> Profile:
    """The server of a run; its law comes from the others."""
    loads = sum(other["host_loads"] for other in others), sum(other["disk_loads"] for other in others)
    seconds = sum(other["host_load_s"] for other in others), sum(other["disk_load_s"] for other in others)
    host_ms, disk_ms = (1e3 * s / n for s, n in zip(seconds, loads, strict=True))
    return Profile(
        "h100/llama-2-7b",
        ModelSpec("llama-2-7b", 2 * 6_738_415_616, KV_BYTES_PER_TOKEN, 0.0),
        GpuSpec("NVIDIA H100 64GB", 64.0 * 2**30),
        EngineSpec(
            "vllm", "0.5.0", 4096, max_num_batched_tokens=4096, max_num_seqs=4096,
            max_cpu_loras=int(row["max_cpu_loras"]),
        ),
        MemorySpec(row["gpu_blocks"] * BLOCK_SIZE * KV_BYTES_PER_TOKEN, 0.0, 0.0, 1),
        LatencySpec("linear", solve(equations(others), TERMS), 0),
        LoadingSpec(host_base_ms=host_ms, disk_base_ms=disk_ms, cold_start=True),
        calibrated=True,
    )  # fmt: skip


def predicted(row: Row, others: list[Row]) -> tuple[float, float]:
    """Loads per request and distinct adapters in the batch, median of the seeds."""
    n, slots = int(row["n_adapters"]), int(row["max_loras"])
    fleet = Workload(
        [Adapter(f"a{i}", RANK, row["rate"]) for i in range(n)],
        Lengths.constant(INPUT_TOKENS),
        Lengths.constant(OUTPUT_TOKENS),
    )
    profile = profile_of(row, others)
    found = []
    for seed in range(SEEDS):
        sim = simulate(fleet, profile, max_loras=slots, max_lora_rank=RANK, duration_s=row["duration_s"], seed=seed)
        found.append((sim.loads_per_request, float(sim.timeline["active_adapters"].mean())))
    loads, active = np.median(found, axis=0)
    return float(loads), float(active)


def main() -> None:
    """Compare, print and write benchmarks/fidelity/loads.json."""
    rows, table = read(), []
    for row in rows:
        others = [other for other in rows if other["max_loras"] != row["max_loras"]]
        measured = (row["host_loads"] - row["max_loras"]) / row["completed"]
        loads, active = predicted(row, others)
        table.append(
            {
                "max_loras": int(row["max_loras"]), "n_adapters": int(row["n_adapters"]),
                "saturated": is_saturated(row), "measured": round(measured, 3), "predicted": round(loads, 3),
                "measured_active": row["mean_adapters_in_batch"], "predicted_active": round(active, 1),
            }
        )  # fmt: skip
        print(table[-1], flush=True)
    errors = {}
    for name, wanted in (("saturated", True), ("unsaturated", False)):
        chosen = [each for each in table if each["saturated"] is wanted]
        relative = [abs(each["predicted"] / each["measured"] - 1.0) for each in chosen]
        errors[name] = {
            "runs": len(chosen),
            "median_relative_error_percent": round(100 * float(np.median(relative)), 1),
        }
    print(json.dumps(errors))
    write_text(HERE / "loads.json", record_text({"errors": errors, "runs": table}) + "\n", force=True)


if __name__ == "__main__":
    main()
