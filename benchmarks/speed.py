"""Measure how fast packer is, and write the table of the README.

    uv run python benchmarks/speed.py                 # print
    uv run python benchmarks/speed.py --write         # … and put it into benchmarks/speed.json and README.md

Each figure is taken in processes of their own: nothing is warm unless it says so.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import packer
from packer.io.files import write_text
from packer.testing.records import record_text

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- speed: benchmarks/speed.py --write -->", "<!-- end of speed -->"
PROFILES = ("h100-64gb/llama-3.1-8b-instruct", "h100-64gb/qwen-2.5-7b-instruct")
RATES = ((3.2, 1.6, 0.8), (0.8, 0.4, 0.2), (0.1, 0.05, 0.025), (0.025, 0.0125, 0.00625))
MAX_REQUESTS_S = 160.0
"""Several times what one of these servers can do; beyond it only drawing the requests takes time."""
PACKER = "import sys; from packer.cli import main; sys.argv[0] = 'packer'; main()"


def start_up_s(repeats: int = 21) -> dict[str, float]:
    """Wall-clock seconds of `packer --help`, with the file cache warm."""
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        subprocess.run(_command("--help"), stdout=subprocess.DEVNULL, check=True)
        found.append(time.perf_counter() - started)
    return {"median": statistics.median(found), "max": max(found)}


def servers() -> Iterator[tuple[packer.Workload, str, int]]:
    """Servers from nearly idle to hopelessly overloaded: fleet, profile, max_loras."""
    for profile in PROFILES:
        for rates in RATES:
            for n in (16, 64, 160, 384):
                if n * sum(rates) / len(rates) > MAX_REQUESTS_S:
                    continue
                fleet = packer.Workload(
                    packer.Adapter(f"a{i}", rank=(8, 16)[i % 2], rate=rates[i % 3]) for i in range(n)
                )
                for slots in (16, 96, 256):
                    yield fleet, profile, slots


def twin_cpu_s() -> dict[str, float]:
    """CPU seconds per simulated hour over `servers`, compilation apart; memory errors are left out."""
    found = []
    for fleet, profile, slots in servers():
        server = packer.load_profile(profile)
        packer.simulate(fleet, server, max_loras=slots, duration_s=1.0)
        started = time.process_time()
        sim = packer.simulate(fleet, server, max_loras=slots, seed=1)
        elapsed = time.process_time() - started
        if sim.status == "ok":
            found.append(elapsed)
    return {"median": statistics.median(found), "max": max(found), "servers": len(found)}


def solve_s(workload: Path, *options: str) -> dict[str, float]:
    """Wall-clock seconds of `packer solve` with nothing compiled and after that (median of 5); peak memory (MiB)."""
    with tempfile.TemporaryDirectory() as scratch:
        # Python keeps compiled modules unless it is configured not to, and so does the measurement.
        environment = {**os.environ, "NUMBA_CACHE_DIR": scratch, "PYTHONDONTWRITEBYTECODE": ""}
        command = _command("solve", str(workload), *options, "--force", "-o", f"{scratch}/plan.json")
        taken = []
        for _ in range(6):
            started = time.perf_counter()
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
            _, status, usage = os.wait4(process.pid, 0)
            taken.append(time.perf_counter() - started)
            process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode != 0:
                raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
        return {
            "cold_s": taken[0],
            "warm_s": statistics.median(taken[1:]),
            "peak_mib": usage.ru_maxrss / 1024,
            "gpus": packer.load_plan(f"{scratch}/plan.json").n_gpus,
        }


def cluster_s(servers: int, adapters: int, duration_s: float, req_s: float) -> dict[str, float]:
    """CPU seconds of a cluster behind the router most-idle, and the peak memory of its process (MiB).

    `req_s` for each server, popularity of adapters by a power law with exponent 1; compilation apart.
    """
    process = subprocess.Popen(
        [sys.executable, __file__, "--cluster", *map(str, (servers, adapters, duration_s, req_s))],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    found: dict[str, float] = json.loads(process.stdout.read())
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return found | {"peak_mib": usage.ru_maxrss / 1024}


def _cluster_run(servers: int, adapters: int, duration_s: float, req_s: float) -> dict[str, float]:
    """What the process of `cluster_s` does."""
    weights = 1.0 / np.arange(1, adapters + 1)
    rates = weights / weights.sum() * servers * req_s
    ranks = (8, 16, 32)
    fleet = packer.Workload(packer.Adapter(f"a{i}", ranks[i % 3], float(rate)) for i, rate in enumerate(rates))
    cluster = packer.Cluster.of(packer.load_profile(PROFILES[0]), servers, max_loras=32, max_lora_rank=32)
    few = packer.Workload([packer.Adapter(f"a{i}", 8, 1.0) for i in range(4)])
    packer.simulate_cluster(few, cluster.resized(2), router="most-idle", duration_s=1.0)
    started = time.process_time()
    run = packer.simulate_cluster(fleet, cluster, router="most-idle", duration_s=duration_s)
    cpu_s = time.process_time() - started
    hours = servers * duration_s / 3600.0
    return {"cpu_s": cpu_s, "cpu_s_per_server_hour": cpu_s / hours, "requests": run.sent, "steps": run.engine_steps}


def thousand(folder: Path) -> Path:
    """A workload of 1,000 adapters: the rates and ranks of the 256-adapter example, over and over."""
    lines = (ROOT / "examples/workloads/paper-256.csv").read_text("utf-8").splitlines()
    rows = [line for line in lines if line and not line.startswith("#")]
    header, body = rows[0], [row.split(",", 1)[1] for row in rows[1:]]
    path = folder / "thousand.csv"
    path.write_text("\n".join([header, *(f"a{i},{body[i % len(body)]}" for i in range(1000))]) + "\n")
    return path


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", PACKER, *arguments]


def machine() -> str:
    """Processor, cores and versions."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = info.read_text("utf-8").splitlines()
        model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), model)
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}, packer {packer.__version__}"


def measure() -> dict[str, Any]:
    """All figures."""
    with tempfile.TemporaryDirectory() as folder:
        examples = ROOT / "examples/workloads"
        return {
            "machine": machine(),
            "load_average": os.getloadavg()[0],
            "date": datetime.now(UTC).date().isoformat(),
            "start_up_s": start_up_s(),
            "twin_cpu_s": twin_cpu_s(),
            "readme_job": solve_s(examples / "azure-conv-2023.csv"),
            "solve_256": solve_s(examples / "paper-256.csv", "--objective", "gpus"),
            "solve_1000": solve_s(thousand(Path(folder)), "--objective", "gpus"),
            "cluster": cluster_s(64, 40_000, 3600.0, 340 / 64),
        }


def table(found: dict[str, Any]) -> str:
    """The figures as the README shows them."""
    twin, start = found["twin_cpu_s"], found["start_up_s"]
    rows = [
        ("`packer --help`", f"{start['median']:.2f} s (median), {start['max']:.2f} s (slowest)"),
        (
            f"twin, CPU time for a simulated hour, {twin['servers']} servers",
            f"{twin['median']:.3f} s (median), {twin['max']:.3f} s (slowest)",
        ),
        ("the fleet above", _job(found["readme_job"])),
        ("256 adapters with `--objective gpus`", _job(found["solve_256"])),
        ("1,000 adapters with `--objective gpus`", _job(found["solve_1000"])),
        (
            f"64 servers for an hour, 40,000 adapters, {found['cluster']['requests']:,.0f} requests, CPU time",
            f"{found['cluster']['cpu_s']:.1f} s, {found['cluster']['peak_mib']:.0f} MiB",
        ),
    ]
    lines = ["| what | measured |", "|---|---|", *(f"| {what} | {value} |" for what, value in rows)]
    load = f"load average {found['load_average']:.1f} before the measurement"
    return "\n".join([*lines, "", f"{found['machine']}; {load}; {found['date']}."])


def _job(job: dict[str, float]) -> str:
    gpus = f"{job['gpus']:.0f} GPU" + ("s" if job["gpus"] != 1 else "")
    seconds = f"{job['cold_s']:.1f} s with nothing compiled, {job['warm_s']:.1f} s from the second time on"
    return f"{seconds}; {job['peak_mib']:.0f} MiB, {gpus}"


def main() -> None:
    """Measure, print, and with --write keep."""
    parser = argparse.ArgumentParser(description="Measure how fast packer is.")
    parser.add_argument("--write", action="store_true", help="update benchmarks/speed.json and README.md")
    parser.add_argument("--cluster", nargs=4, metavar=("SERVERS", "ADAPTERS", "SECONDS", "REQ_S"), help="one cluster")
    options = parser.parse_args()
    if options.cluster:
        servers, adapters, duration_s, req_s = options.cluster
        print(json.dumps(_cluster_run(int(servers), int(adapters), float(duration_s), float(req_s))))
        return
    found = measure()
    print(table(found))
    if options.write:
        write_text(ROOT / "benchmarks/speed.json", record_text(found) + "\n")
        readme = (ROOT / "README.md").read_text("utf-8")
        before, rest = readme.split(BEGIN)
        after = rest.split(END)[1]
        write_text(ROOT / "README.md", f"{before}{BEGIN}\n{table(found)}\n{END}{after}")


if __name__ == "__main__":
    main()
