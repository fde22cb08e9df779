"""Score the shipped predictors on real one-hour runs of vLLM on an H100 (runs.csv and adapters.csv.gz)."""

from __future__ import annotations

import csv
import gzip
import random
from pathlib import Path
from typing import Any

import numpy as np

from packer.adapter import Adapter
from packer.bin import Bin
from packer.lengths import Lengths
from packer.predictors.learned import LearnedPredictor
from packer.predictors.store import KINDS, shipped_model
from packer.profile import Profile
from packer.twin.scores import macro_f1, smape
from packer.workload import SHAREGPT_CORRELATION, Workload

GENERATED = {"llama-3.1-8b-instruct": 0.991, "qwen-2.5-7b-instruct": 0.958}
"""Output tokens generated / requested."""


def questions(profile: Profile, folder: Path) -> list[tuple[Workload, Bin, dict[str, str]]]:
    """The runs of the profile's model that started: the fleet, its server, and what was measured."""
    with gzip.open(folder / "adapters.csv.gz", "rt") as file:
        rates: dict[str, list[float]] = {}
        for row in csv.DictReader(file):
            rates.setdefault(row["run_id"], []).append(float(row["rate"]))
    with (folder / "runs.csv").open() as file:
        runs = [
            run
            for run in csv.DictReader(file)
            if run["status"] == "ok" and run["model"] == profile.model.name and run["run_id"] in rates
        ]
    found = []
    for run in runs:
        fleet = _workload(run, rates[run["run_id"]])
        settings = profile.settings(int(run["max_loras"]), int(run["max_lora_rank"]))
        found.append((fleet, Bin(tuple(range(len(fleet))), settings, profile), run))
    return found


def score(profile: Profile, folder: Path) -> dict[str, Any]:
    """Macro F1 of starvation and SMAPE (0–200 form) by kind, on the runs of the profile's model."""
    servers = questions(profile, folder)
    starved = np.array([run["starved"] == "1" for _, _, run in servers])
    measured = np.array([float(run["total_tok_s"]) for _, _, run in servers])
    itl = np.array([float(run["itl_mean_ms"]) for _, _, run in servers])
    result: dict[str, Any] = {"runs": len(servers)}
    for kind in KINDS:
        predictor = LearnedPredictor(shipped_model(kind, profile)[0], profile)
        told = [predictor.evaluate(fleet, [item])[0] for fleet, item, _ in servers]
        result[kind] = {
            "starvation_macro_f1": macro_f1(zip((row.starved for row in told), starved, strict=True)),
            "throughput_smape": smape(zip((row.total_token_throughput for row in told), measured, strict=True)),
            "mean_itl_smape": smape(zip((row.mean_itl_ms for row in told), itl, strict=True)),
        }
    return result


def _workload(run: dict[str, str], rates: list[float]) -> Workload:
    """The fleet as given before the run; of the ranks only the counts are known."""
    ranks = []
    for item in run["size_counts"].split(";"):
        rank, count = item.split(":")
        ranks += [int(rank)] * int(count)
    ranks = (ranks * (len(rates) // len(ranks) + 1))[: len(rates)]
    random.Random(0).shuffle(ranks)
    return Workload(
        [Adapter(f"a{i}", rank, rate) for i, (rank, rate) in enumerate(zip(ranks, rates, strict=True))],
        Lengths.gamma(float(run["pool_mean_input_tokens"]), 1.1),
        Lengths.gamma(float(run["pool_mean_output_tokens"]) * GENERATED[run["model"]], 1.04),
        SHAREGPT_CORRELATION,
    )
