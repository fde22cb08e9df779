"""Systems on four servers (README), and what clusters of many servers cost (docs/performance.md).

uv run python benchmarks/cluster.py                # print
uv run python benchmarks/cluster.py --write        # … and put the tables into README.md and docs/performance.md
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import packer
from packer.io.files import write_text
from packer.operate.systems import SystemResult

sys.path.insert(0, str(Path(__file__).parent))
from speed import cluster_s

ROOT = Path(__file__).resolve().parent.parent
FLEET, CLUSTER = "examples/workloads/azure-conv-2023.csv", "examples/clusters/four-h100.toml"
SYSTEMS = ("packer", "affinity", "vllm", "round-robin", "hrw")
COLUMNS = (
    ("total_token_throughput", "throughput, tok/s", 0),
    ("mean_ttft_ms", "TTFT, ms", 0),
    ("p99_ttft_ms", "p99 TTFT, ms", 0),
    ("mean_tpot_ms", "TPOT, ms", 1),
    ("p99_tpot_ms", "p99 TPOT, ms", 1),
    ("preemptions", "preemptions", 0),
    ("hit_rate", "hits", 3),
)
SCALE = ((4, 600.0), (64, 600.0), (1024, 600.0))
"""Servers and simulated seconds."""
ADAPTERS = 1_000_000


def systems_table(results: list[SystemResult]) -> str:
    """One row per system: means over the seeds."""
    lines = [
        "| system | router | " + " | ".join(name for _, name, _ in COLUMNS) + " |",
        "|---" * (len(COLUMNS) + 2) + "|",
    ]
    for result in results:
        cells = []
        for key, _, digits in COLUMNS:
            cells.append(f"{result.figures[key].mean:,.{digits}f}")
        lines.append(f"| `{result.system}` | {result.router} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def scale_table() -> str:
    """One row per number of servers, and a straight line through the last two for 100,000."""
    lines = [
        "| servers | requests | CPU | CPU for a server-hour | peak memory |",
        "|---|---|---|---|---|",
    ]
    found = []
    for servers, seconds in SCALE:
        row = cluster_s(servers, ADAPTERS, seconds, 4.0)
        found.append((servers, row))
        lines.append(
            f"| {servers:,} | {row['requests']:,.0f} | {row['cpu_s']:.1f} s | "
            f"{row['cpu_s_per_server_hour'] * 1e3:,.0f} ms | {row['peak_mib']:,.0f} MiB |"
        )
    (few, one), (many, other) = found[-2:]
    slope = (other["peak_mib"] - one["peak_mib"]) / (many - few)
    memory = (other["peak_mib"] + slope * (100_000 - many)) / 1024
    lines.append(f"| 100,000, by a straight line | | | | {memory:,.0f} GiB |")
    return "\n".join(lines)


def put(path: Path, mark: str, text: str) -> None:
    """Replace what stands between the marks of a document."""
    begin, end = f"<!-- {mark}: benchmarks/cluster.py --write -->", f"<!-- end of {mark} -->"
    before, rest = path.read_text("utf-8").split(begin)
    write_text(path, f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}")


def main() -> None:
    """Measure, print, and with --write keep."""
    parser = argparse.ArgumentParser(
        description="Compare systems on four servers, and measure large clusters."
    )
    parser.add_argument("--write", action="store_true", help="update README.md and docs/performance.md")
    parser.add_argument("--only", choices=("systems", "scale"), help="one of the two tables")
    options = parser.parse_args()
    if options.only != "scale":
        fleet, cluster = packer.read_workload(ROOT / FLEET), packer.read_cluster(ROOT / CLUSTER)
        table = systems_table(packer.compare_systems(fleet, cluster, SYSTEMS, seeds=5))
        print(table)
        if options.write:
            put(ROOT / "README.md", "systems", table)
    if options.only != "systems":
        table = scale_table()
        print(table)
        if options.write:
            put(ROOT / "docs/performance.md", "clusters", table)


if __name__ == "__main__":
    main()
