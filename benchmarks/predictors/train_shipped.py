"""Rebuild the trained predictors that travel with packer: the same bytes from the same seed.

    python benchmarks/predictors/train_shipped.py [--rows 22000] [--seed 0] [--profile NAME]... [--kinds tree]

Datasets go to build/datasets (an interrupted build goes on where it stopped; one that is there is used again if
it belongs to the profile as it is now). Predictors go to predictors/models.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from packer.errors import FileFormatError
from packer.io.profiles import load_profile
from packer.predictors.build import build_dataset
from packer.predictors.dataset import Dataset, Spec, read_dataset
from packer.predictors.store import KINDS, file_name, write_model
from packer.predictors.train import train
from packer.profile import Profile
from packer.words import number

ROWS = 22_000  # of the predictors that are shipped
ROOT = Path(__file__).resolve().parents[2]
PROFILES = ("h100-64gb/llama-3.1-8b-instruct", "h100-64gb/qwen-2.5-7b-instruct")


def dataset_for(profile: Profile, folder: Path, rows: int, seed: int) -> Dataset:
    """The dataset of a profile: read if it is there and fits, else built."""
    path = folder / f"{profile.name.replace('/', '--')}.parquet"
    spec = Spec(profile.name, profile.fingerprint, rows, seed)
    try:
        known = read_dataset(path)
    except FileFormatError:
        known = None
    if known is not None and known.spec == spec:
        return known
    started = time.monotonic()
    cpu = os.times()
    build_dataset(profile, path, rows=rows, seed=seed, force=True, progress=_say)
    spent = os.times()
    cpu_s = sum(spent[:4]) - sum(cpu[:4])
    print(f"{path.name}: {rows} scenarios in {time.monotonic() - started:.0f} s, {cpu_s:.0f} s of CPU")
    return read_dataset(path)


def _say(what: str, done: int, total: int) -> None:
    print(f"\r{what}: {done} of {total}", end="" if done < total else "\n", flush=True)


def main() -> None:
    """Build what the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile", action="append", dest="profiles")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--datasets", type=Path, default=ROOT / "build" / "datasets")
    parser.add_argument("--models", type=Path, default=ROOT / "predictors" / "models")
    arguments = parser.parse_args()
    arguments.datasets.mkdir(parents=True, exist_ok=True)
    for name in arguments.profiles or PROFILES:
        profile = load_profile(name)
        data = dataset_for(profile, arguments.datasets, arguments.rows, arguments.seed)
        for kind in arguments.kinds.split(","):
            started = time.process_time()
            model = train(kind, data, seed=arguments.seed, refine=kind == "tree")
            path = arguments.models / file_name(kind, name)
            write_model(model, path)
            card = model.header["scores"]["all"]
            print(
                f"{path.name}: {path.stat().st_size / 1e3:.0f} kB, throughput SMAPE "
                f"{card['throughput_smape']:.1f} %, macro F1 {number(card['starvation_macro_f1'], 3)}, "
                f"{time.process_time() - started:.0f} s of CPU",
                flush=True,
            )


if __name__ == "__main__":
    main()
