"""Estimates against public measurements of vLLM: TPOT of every row by the twin in closed loop.

uv run python benchmarks/accuracy/run.py [--rows N] [--write] [--check]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from rows import Server, drawn, servers

import packer
from packer.arrays import FloatArray
from packer.fit.estimate import estimate_profile
from packer.testing.records import record_text

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "estimates.md"
BOUNDS = {"dense": (6.0, 18.0, 4.0), "experts": (10.0, 30.0, 6.0)}
"""Median, 90th percentile and bias of all rows, %, that `--check` holds."""
REQUESTS = 5
"""Requests of each client that are simulated, the first of which is left out."""


def simulated_tpot_ms(server: Server, rows: np.ndarray) -> FloatArray:
    """TPOT of these rows by the twin, float64 (rows,)."""
    found = []
    for i in rows:
        prompt, output = int(server.prompt[i]), int(server.output[i])
        clients = int(server.concurrency[i])
        profile = estimate_profile(
            server.model,
            server.sheet.name,
            tensor_parallel_size=server.gpus,
            data_parallel_size=server.ranks,
            kv_cache_dtype="fp8" if server.fp8_cache else "bfloat16",
            max_model_len=prompt + output + 200,
        )
        fleet = packer.Workload(
            adapters=[packer.Adapter("base", rank=0, rate=1.0)], input_tokens=drawn(prompt), output_tokens=drawn(output)
        )
        long_s = REQUESTS * server.tpot_ms[i] * 1e-3 * output
        run = packer.simulate(
            fleet, profile, max_loras=1, max_lora_rank=8, concurrency=clients, duration_s=long_s, seed=0
        )
        found.append(run.mean_tpot_ms if run.status == "ok" else np.nan)
    return np.array(found)


def figures(error: FloatArray) -> dict[str, float]:
    """Rows, median and 90th percentile of the size, and bias, %."""
    off = 100.0 * error[np.isfinite(error)]
    size = np.abs(off)
    known = {"median": np.median(size), "p90": np.quantile(size, 0.9), "bias": off.mean()}
    return {"rows": len(off)} | {name: round(float(value), 1) for name, value in known.items()}


def page(table: list[dict[str, object]], total: dict[str, dict[str, float]], inside: float) -> str:
    """The table for people."""
    lines = [
        "# Estimates against measurements", "",
        "Error of the mean time per output token, %, of estimated profiles in closed loop against public measurements "
        "of vLLM 0.12 to 0.19 (ai-dynamo/aiconfigurator, Apache-2.0; without rows with a TTFT of 3 s and more). The "
        "shares of the roofline were fitted to these rows; `benchmarks/accuracy/fit_shares.py` leaves out servers, "
        "GPUs and models. Lengths are drawn from 80 to 100 % of the nominal ones, as the client did. EP: with "
        "`--enable-expert-parallel`; DP: with data-parallel ranks.", "",
        "| GPU | model | weights | TP | rows | median | p90 | bias | band (p90) |", "|" + "---|" * 9,
    ]  # fmt: skip
    columns = ("gpu", "model", "weights", "tp", "rows", "median", "p90", "bias", "band_p90")
    order = sorted(table, key=lambda row: [str(row[column]) for column in columns[:4]])
    lines += ["| " + " | ".join(str(row[column]) for column in columns) + " |" for row in order]
    for kind, found in total.items():
        lines.append(f"| **{kind}, all** | | | | " + " | ".join(str(value) for value in found.values()) + " | |")
    lines += ["", f"{inside:.0f} % of the rows are within the band that their profile carries."]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Simulate, print a table, and write or check it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=6, help="rows of each server; 0: all")
    parser.add_argument("--write", action="store_true", help="write results.json")
    parser.add_argument("--check", action="store_true", help="exit code 1 above the bounds")
    given = parser.parse_args()
    every: dict[str, list[FloatArray]] = {"dense": [], "experts": []}
    table: list[dict[str, object]] = []
    inside, n = 0, 0
    for server in servers():
        rng = np.random.default_rng(0)
        rows = np.arange(len(server.tpot_ms))
        if given.rows and len(rows) > given.rows:
            rows = np.sort(rng.choice(rows, given.rows, replace=False))
        error = simulated_tpot_ms(server, rows) / server.tpot_ms[rows] - 1.0
        band = estimate_profile(
            server.model,
            server.sheet.name,
            tensor_parallel_size=server.gpus,
            data_parallel_size=server.ranks,
            max_model_len=8192,
        ).errors["base_tpot_p90"]
        inside, n = inside + int((np.abs(error) <= band).sum()), n + int(np.isfinite(error).sum())
        every["experts" if server.model.experts else "dense"].append(error)
        where = {
            "gpu": server.sheet.name,
            "model": server.model.name,
            "weights": server.precision + (", FP8 cache" if server.fp8_cache else ""),
            "tp": server.groups,
        }
        table.append(where | {**figures(error), "band_p90": round(100 * band, 1)})
        line = "{gpu:12s} {model:14s} {weights:15s} {tp:15s} {rows:4d} {median:6.1f} {p90:6.1f} {bias:+6.1f}"
        print(line.format(**table[-1]), flush=True)
    total = {kind: figures(np.concatenate(errors)) for kind, errors in every.items() if errors}
    print(json.dumps(total), f"in the band: {100 * inside / n:.0f} %")
    if given.write:
        (HERE / "results.json").write_text(record_text({"total": total, "servers": table}) + "\n", "utf-8")
        PAGE.write_text(page(table, total, 100 * inside / n), "utf-8")
    broken = [
        f"{kind} {name}" for kind, found in total.items()
        for name, bound in zip(("median", "p90", "bias"), BOUNDS[kind], strict=True) if abs(found[name]) > bound
    ]  # fmt: skip
    if given.check and broken:
        print("above the bounds: " + ", ".join(broken), file=sys.stderr)
    return int(given.check and bool(broken))


if __name__ == "__main__":
    sys.exit(main())
