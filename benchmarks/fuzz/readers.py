"""Coverage-guided fuzzing of everything that reads a user's file (needs `pip install atheris`).

    python benchmarks/fuzz/readers.py -max_total_time=600 CORPUS_FOLDER

Each input is a choice of reader (first byte) and a file's content. A reader may return or raise `PackerError`;
anything else, a run of more than 20 s or more than 2 GB is a finding. The corpus starts from a valid file for each
reader, which `--seeds` writes.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["packer", "yaml", "json", "csv", "tomllib", "pydantic"]):
    import packer.cli.config
    from packer.errors import PackerError
    from packer.export.sources import read_sources
    from packer.io.plans import read_plan
    from packer.io.profiles import load_profile
    from packer.io.workloads import read_workload
    from packer.report.page import read_comparison
    from packer.traces.access_log import read_access_log
    from packer.traces.prometheus import SOURCES, parse, read_export
    from packer.traces.ranks import read_ranks
    from packer.traces.read import read_trace

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(tempfile.mkdtemp(prefix="packer-fuzz-"))


def _metrics(path: str) -> None:
    answers = read_export(path)
    for source in SOURCES.values():
        with contextlib.suppress(PackerError):
            parse(answers, source)


READERS: tuple[tuple[str, Callable[[str], object]], ...] = (
    ("w.csv", read_workload),
    ("w.json", read_workload),
    ("w.yaml", read_workload),
    ("w.parquet", read_workload),
    ("w.csv.gz", read_workload),
    ("t.csv", read_trace),
    ("t.jsonl", read_trace),
    ("t.parquet", read_trace),
    ("p.json", read_plan),
    ("profile.toml", load_profile),
    ("s.csv", read_sources),
    ("s.json", read_sources),
    ("s.yaml", read_sources),
    ("ranks.csv", read_ranks),
    ("log.jsonl", read_access_log),
    ("metrics.json", _metrics),
    ("compared.json", read_comparison),
    ("packer.toml", lambda path: packer.cli.config._read.__wrapped__(Path(path), 0.0)),  # noqa: SLF001
)


def one_input(data: bytes) -> None:
    """Give one file to one reader."""
    if len(data) < 2:
        return
    name, read = READERS[data[0] % len(READERS)]
    path = FOLDER / name
    path.write_bytes(data[1:])
    with contextlib.suppress(PackerError):
        read(str(path))


def write_seeds(folder: Path) -> None:
    """One valid file for each reader, where the tree has one."""
    folder.mkdir(parents=True, exist_ok=True)
    table = b"adapter,rank,rate\na,8,0.1\nb,16,0.2\n"
    series = {"metric": {"requested_model": "a"}, "values": [[60, "5"], [120, "7"]]}
    answer = {"status": "success", "data": {"resultType": "matrix", "result": [series]}}
    metrics = {
        "window_s": 60,
        "requests": answer,
        "input_tokens": answer,
        "output_tokens": answer,
        "running": answer,
    }
    adapters = [{"name": "a", "rank": 8, "rate": 0.1}]
    profile = next((ROOT / "twin" / "profiles").rglob("*.toml")).read_bytes()
    seeds = {
        "w.csv": table,
        "w.json": json.dumps(
            {"adapters": adapters, "input_tokens": {"kind": "gamma", "mean": 9, "cv": 1}}
        ).encode(),
        "w.yaml": b"adapters:\n- name: a\n  rank: 8\n  rate: 0.1\narrivals:\n  kind: poisson\n",
        "t.csv": b"timestamp,adapter,rank,input_tokens,output_tokens\n0,a,8,10,3\n2024-05-01 10:00:00,a,8,10,3\n",
        "t.jsonl": b'{"timestamp": 0, "input_length": 10, "output_length": 3}\n',
        "profile.toml": profile,
        "s.csv": b"adapter,source\na,acme/a\n",
        "s.json": b'{"a": "acme/a"}',
        "s.yaml": b"a: acme/a\n",
        "ranks.csv": b"adapter,rank\na,8\n",
        "log.jsonl": b'{"time": 5, "model": "a", "usage": {"prompt_tokens": 5, "completion_tokens": 4}}\n',
        "metrics.json": json.dumps(metrics).encode(),
        "compared.json": b'[{"solver": "greedy", "gpus": 3}]',
        "packer.toml": b"[solve]\ntime-limit = 5\n",
    }
    with contextlib.suppress(PackerError):
        from packer.solvers.api import solve

        fleet = FOLDER / "fleet.csv"
        fleet.write_bytes(table)
        plan = solve(read_workload(fleet), load_profile("h100-64gb/llama-3.1-8b-instruct"))
        plan.save(FOLDER / "plan.json")
        seeds["p.json"] = (FOLDER / "plan.json").read_bytes()
    for number, (name, _) in enumerate(READERS):
        if name in seeds:
            (folder / name).write_bytes(bytes([number]) + seeds[name])


def main() -> None:
    """Write seeds, or fuzz."""
    warnings.simplefilter("ignore")
    if sys.argv[1:2] == ["--seeds"]:
        write_seeds(Path(sys.argv[2]))
        return
    atheris.Setup([*sys.argv, "-timeout=20", "-rss_limit_mb=2048", "-max_len=20000"], one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
