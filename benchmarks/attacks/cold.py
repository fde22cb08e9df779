"""What a command costs where compiled code can't be kept, against its first run with a cache folder.

    python benchmarks/attacks/cold.py --json benchmarks/attacks/cold.json

Each command that computes runs in three places: an empty cache folder, `NUMBA_CACHE_DIR` that is a file, and a
read-only root in a mount namespace (`unshare -m`). CPU and wall time count the processes that a command starts.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fuzz"))

from faults import prepare

from packer.testing.records import record_text

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "import sys; sys.argv[0] = 'packer'; from packer.cli import main; main()"
COMMANDS = (
    "solve f.csv -o o.json",
    "solve f.csv --objective gpus --predictor tree -o o.json",
    "evaluate plan.json --seed 5",
    "simulate f.csv --max-loras 2 --duration 60",
    "simulate f.csv --cluster cluster.toml --duration 60",
    "sweep f.csv --adapters 2,4 --max-loras 2 --duration 60 -o s.csv",
    "compare f.csv --solvers greedy,random --predictors tree -o c.csv",
    "compare f.csv --cluster cluster.toml --systems vllm,s-lora --duration 60 --seeds 2 -o c.json",
    "schedule f.csv --rates day.csv --period 43200 -o o.json",
    "memory --max-loras 8 --max-lora-rank 8",
    "report plan.json -o r.html",
    "predictor build --profile given.toml --rows 4 --jobs 1 -o d.parquet",
    "init f.csv --model meta-llama/Llama-3.1-8B-Instruct --gpu h100-64gb -o new",
    "live follow plan.json --simulate r.json -o o.json",
)


def taken(words: str, place: str, home: Path, folder: Path) -> tuple[float, float]:
    """CPU and wall time of a command in a place, s."""
    shutil.copytree(home, folder / "work")
    cache = folder / "cache"
    own = {"PYTHONPATH": str(ROOT), "PACKER_CONFIG": "", "NUMBA_CACHE_DIR": str(cache)}
    cache.touch() if place == "a file" else cache.mkdir()
    command = [sys.executable, "-c", PROGRAM, *words.split()]
    if place == "read-only":  # the working folder alone can be written to
        mounts = 'mount -o remount,bind,ro / && mount -t tmpfs none "$0" && cp -r "$1"/. "$0"'
        mounts += ' && cd "$0" && shift && exec "$@"'
        command = ["unshare", "-m", "sh", "-c", mounts, str(folder / "work"), str(home), *command]
        own["NUMBA_CACHE_DIR"], own["TMPDIR"] = "", str(folder / "work")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    begun = time.monotonic()
    done = subprocess.run(
        command,
        cwd=folder / "work",
        env=os.environ | own | {"HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    wall_s = time.monotonic() - begun
    if done.returncode not in (0, 3):
        raise SystemExit(f"{words} in {place!r} ended with {done.returncode}: {done.stderr[-500:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    shutil.rmtree(folder)
    return after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime, wall_s


def main() -> None:
    """Run them all and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="commands that contain this")
    parser.add_argument("--json", type=Path, help="write the record here")
    given = parser.parse_args()
    chosen = [words for words in COMMANDS if given.only in words]
    record = {}
    with tempfile.TemporaryDirectory(prefix="packer-cold-") as name:
        home = Path(name) / "home"
        home.mkdir()
        prepare(home, tuple(chosen), "")
        for words in chosen:
            figures = {}
            for place in ("cold", "a file", "read-only"):
                folder = Path(name) / "run"
                folder.mkdir()
                cpu_s, wall_s = taken(words, place, home, folder)
                figures[place] = {"cpu_s": round(cpu_s, 1), "wall_s": round(wall_s, 1)}
            most = max(figures[place]["cpu_s"] / figures["cold"]["cpu_s"] for place in figures)
            record[words] = figures | {"times": round(most, 2)}
            print(words, record[words], flush=True)
            if given.json is not None:
                given.json.write_text(record_text(record) + "\n", "utf-8")
    sys.exit(any(each["times"] > 3.0 for each in record.values()))


if __name__ == "__main__":
    main()
