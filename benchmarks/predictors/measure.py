"""Measure the learned predictors: accuracy on real runs and on unseen lengths, and speed.

    python benchmarks/predictors/measure.py [--h100 ../shared/data/h100] [--json results.json]

Times are medians of CPU time, so that other work on the machine does not count. "Compiled" means called from
compiled code; the other times include the call from Python.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit
from real_runs import score

from packer.adapter import Adapter
from packer.bin import Bin
from packer.evaluation import STARVATION_THRESHOLD
from packer.io.profiles import load_profile
from packer.lengths import Lengths
from packer.predictors.auto import AutoPredictor
from packer.predictors.bin_table import BinTable
from packer.predictors.build import MAX_OUTSTANDING
from packer.predictors.ensemble import Ensemble, walk_one
from packer.predictors.families import family_of
from packer.predictors.features import FeatureExtractor
from packer.predictors.learned import LearnedPredictor
from packer.predictors.scenarios import scenario
from packer.predictors.store import KINDS, shipped_model
from packer.predictors.targets import OUTPUTS
from packer.profile import Profile
from packer.testing.records import record_text
from packer.twin.flags import FLAGS
from packer.twin.scores import macro_f1, smape
from packer.twin.until_clear import evaluate_until_clear
from packer.workload import Workload

PROFILES = ("h100-64gb/llama-3.1-8b-instruct", "h100-64gb/qwen-2.5-7b-instruct")
LENGTHS = ((64, 512), (2000, 100), (1024, 1024), (32, 32), (512, 64), (128, 1024))
QUESTIONS = 10_000
REPEATS = 15


@njit(**FLAGS)
def ask_all(x: Any, trees: Ensemble, first: int, last: int) -> float:
    """One question after another, from compiled code."""
    total = 0.0
    for i in range(x.shape[0]):
        total += walk_one(x[i], trees, first, last)
    return total


def median_us(work: Callable[[], object], questions: int) -> float:
    """Median CPU time of a question, µs."""
    work()
    times = []
    for _ in range(REPEATS):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return float(np.median(times) / questions * 1e6)


def questions(profile: Profile, seed: int) -> tuple[Workload, BinTable]:
    """Random bins of a fleet of 384 adapters."""
    rng = np.random.default_rng(seed)
    fleet = Workload(
        [Adapter(f"a{i}", (8, 16, 32)[i % 3], float(rate)) for i, rate in enumerate(rng.choice((0.4, 0.1, 0.025), 384))]
    )
    bins = []
    for _ in range(QUESTIONS):
        n = int(rng.integers(8, 256))
        bins.append(
            Bin(tuple(rng.permutation(384)[:n].tolist()), profile.settings(int(rng.choice((16, 64, 128))), 32), profile)
        )
    return fleet, BinTable.of(bins)


def speed(profile: Profile) -> dict[str, Any]:
    """µs a question, of each kind that is made of trees."""
    fleet, table = questions(profile, 1)
    extractor = FeatureExtractor(fleet, profile)
    features = extractor.matrix(table)
    found: dict[str, Any] = {
        "adapters_per_bin": float(np.mean(table.end - table.start)),
        "features_us": median_us(lambda: extractor.matrix(table), QUESTIONS),
        "kv_capacity_us": median_us(lambda: extractor.kv_cache_tokens(table), QUESTIONS),
    }
    x = np.ascontiguousarray(features, dtype=np.float32)
    wide = np.column_stack([x, np.full(len(x), -np.inf, dtype=np.float32)])
    starved, share = OUTPUTS.index("starved"), OUTPUTS.index("served_share")
    for kind in ("forest", "boosting", "tree"):
        model, where = shipped_model(kind, profile)
        ensemble = family_of(model)
        assert isinstance(ensemble, Ensemble)
        predictor = LearnedPredictor(model, profile, where=where)
        row: dict[str, float] = {}
        for name, output in (("starvation", starved), ("throughput", share)):
            first, last = int(ensemble.starts[output]), int(ensemble.starts[output + 1])
            trees = (ensemble, first, last)
            row[f"{name}_single_compiled_us"] = median_us(lambda trees=trees: ask_all(wide[:2000], *trees), 2000)
            row[f"{name}_single_python_us"] = median_us(
                lambda trees=trees: [ask_all(wide[i : i + 1], *trees) for i in range(200)], 200
            )
        row["both_batch_us"] = median_us(
            lambda e=ensemble: [e.rows(x, output) for output in (starved, share)], QUESTIONS
        )
        row["all_figures_with_features_us"] = median_us(
            lambda p=predictor: p.evaluate_table(fleet, table)[0], QUESTIONS
        )
        bins = [Bin(tuple(range(100)), profile.settings(32, 32), profile)]
        row["evaluate_one_bin_us"] = median_us(
            lambda p=predictor, b=bins: [p.evaluate(fleet, b) for _ in range(50)], 50
        )
        found[kind] = row
    return found


def unseen_lengths(profile: Profile, per_pair: int) -> dict[str, Any]:
    """Grid scenarios with other lengths, rates scaled to stay interesting, against the twin."""
    cases: list[tuple[Workload, Bin]] = []
    truth: list[float] = []
    rng = np.random.default_rng(99)
    for pair, (prompt, output) in enumerate(LENGTHS):
        taken, index = 0, 10_000_000 + 1000 * pair
        while taken < per_pair:
            index += 1
            case = scenario(index, profile, 77)
            if case.family != "grid":
                continue
            fleet = Workload(case.workload.adapters, Lengths.gamma(prompt, 0.8), Lengths.gamma(output, 0.8), 0.0)
            server = Bin(tuple(range(len(fleet))), case.settings, profile)
            use = FeatureExtractor(fleet, profile).matrix(BinTable.of([server]))[0, 20]
            fleet = fleet.scaled(float(np.exp(rng.uniform(np.log(0.3), np.log(3.0))) / use))
            found = evaluate_until_clear(
                fleet, profile, case.settings,
                max_outstanding=MAX_OUTSTANDING,
            )  # fmt: skip
            cases.append((fleet, server))
            truth.append(found.evaluation.served_share)
            taken += 1
    actual = np.array(truth)
    result: dict[str, Any] = {"servers": len(cases), "lengths": [list(pair) for pair in LENGTHS]}
    for kind in KINDS:
        predictor = LearnedPredictor(*_shipped(kind, profile))
        told = [predictor.evaluate(fleet, [server])[0] for fleet, server in cases]
        share = np.array([row.served_share for row in told])
        starved = np.array([row.starved for row in told])
        result[kind] = {
            "throughput_smape": smape(np.column_stack((share, actual))),
            "starvation_macro_f1": macro_f1(np.column_stack((starved, actual < STARVATION_THRESHOLD))),
        }
    return result


def _shipped(kind: str, profile: Profile) -> tuple[Any, Profile]:
    return shipped_model(kind, profile)[0], profile


def left_to_twin(profile: Profile) -> dict[str, Any]:
    """How many mixed scenarios `auto` leaves to the twin, and how many predictions of starvation that corrects."""
    auto = AutoPredictor.for_profile(profile)
    wrong_learned = wrong_auto = 0
    for index in range(20_000_000, 20_000_120):
        case = scenario(index, profile, 78)
        server = [case.bin(profile)]
        twin = bool(auto.twin.evaluate(case.workload, server).starved[0])
        wrong_learned += bool(auto.learned.evaluate(case.workload, server).starved[0]) != twin
        wrong_auto += bool(auto.evaluate(case.workload, server).starved[0]) != twin
    return {
        "requested": auto.requested,
        "left_to_twin": auto.left_to_twin,
        "wrong_learned": wrong_learned,
        "wrong_auto": wrong_auto,
    }


def machine() -> str:
    """Name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores, Python {platform.python_version()}"


def main() -> None:
    """Measure everything and print it; `--json` writes it too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--h100", type=Path, default=Path("../shared/data/h100"))
    parser.add_argument("--per-pair", type=int, default=25)
    parser.add_argument("--profile", action="append", dest="profiles")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    report: dict[str, Any] = {"machine": machine()}
    for name in arguments.profiles or PROFILES:
        profile = load_profile(name)
        report[name] = {
            "fingerprint": profile.fingerprint,
            "rows": {kind: shipped_model(kind, profile)[0].header["rows"] for kind in KINDS},
            "speed": speed(profile),
            "unseen_lengths": unseen_lengths(profile, arguments.per_pair),
            "auto": left_to_twin(profile),
        }
        if arguments.h100.is_dir():
            report[name]["real_runs"] = score(profile, arguments.h100)
        print(record_text({name: report[name]}), flush=True)
    if arguments.json:
        arguments.json.write_text(record_text(report) + "\n", "utf-8")


if __name__ == "__main__":
    main()
