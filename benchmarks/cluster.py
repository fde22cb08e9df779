"""Systems on four servers, tuned alike (README), with older counts (docs/comparison.md); costs of large clusters.

uv run python benchmarks/cluster.py                # print
uv run python benchmarks/cluster.py --write        # … into README.md, docs/comparison.md and docs/performance.md
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import packer
from packer.io.files import write_text
from packer.operate.verdict import verdict
from packer.twin.cluster.system import System, load_system

sys.path.insert(0, str(Path(__file__).parent))
from speed import cluster_s

ROOT = Path(__file__).resolve().parent.parent
FLEET, CLUSTER = "examples/workloads/azure-conv-2023.csv", "examples/clusters/four-h100.toml"
SYSTEMS = ("packer", "affinity", "llm-d", "vllm", "round-robin", "hrw")
SLOTS = (4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96)
ROUTERS = {"affinity": ("affinity:slack=4", "affinity:slack=16"), "llm-d": ("gateway", "gateway:lora=4")}
"""Systems with a setting besides slots: weights of llm-d are its default, or LoRA affinity as the queue and the KV
cache together."""
TUNING_SEEDS, SEEDS = range(1000, 1002), 6
"""Settings of every system but the plan, which chooses its own, are tuned on seeds that are not shown."""
COLUMNS = (
    ("slo_attainment", "SLO kept", 3),
    ("total_token_throughput", "throughput, tok/s", 0),
    ("mean_ttft_ms", "TTFT, ms", 0),
    ("p99_ttft_ms", "p99 TTFT, ms", 0),
    ("mean_tpot_ms", "TPOT, ms", 1),
    ("hit_rate", "hits", 3),
)
AGES_S = (0.0, 0.05, 1.0, 5.0)
"""How old the counts that routers read may be, s."""
SCALE = ((4, 600.0), (64, 600.0), (1024, 600.0))
"""Servers and simulated seconds."""
ADAPTERS = 1_000_000


def tuned(
    fleet: packer.Workload, cluster: packer.Cluster, system: str, duration_s: float | None = None
) -> tuple[System, packer.Cluster, str]:
    """The settings with the highest SLO attainment on the tuning seeds, then the lowest TPOT, and what they are.

    Every system gets twelve tries: as many numbers of slots, or half as many with two settings of its router.
    """
    given = load_system(system)
    if given.placement is not None:
        return given, cluster, "its own"
    routers = ROUTERS.get(system, (given.router,))
    tries = [(slots, router) for slots in SLOTS[len(routers) - 1 :: len(routers)] for router in routers]
    scores = []
    for slots, router in tries:
        kinds = tuple(replace(kind, max_loras=slots) for kind in cluster.kinds)
        own, how = replace(cluster, kinds=kinds), replace(given, router=router)
        (found,) = packer.compare_systems(
            fleet, own, [how], seeds=len(TUNING_SEEDS), seed=TUNING_SEEDS[0], duration_s=duration_s
        )
        key = (-round(found.figures["slo_attainment"].mean or 0.0, 3), found.figures["mean_tpot_ms"].mean)
        text = f"{slots} slots" + (f", {router.partition(':')[2]}" if ":" in router else "")
        scores.append((key, how, own, text))
    return min(scores, key=lambda row: row[0])[1:]


def systems_table(fleet: packer.Workload, cluster: packer.Cluster) -> str:
    """One row per system: means over the seeds with half of their 95 % intervals, then the verdict."""
    lines = [
        "| system | settings | " + " | ".join(name for _, name, _ in COLUMNS) + " |",
        "|---" * (len(COLUMNS) + 2) + "|",
    ]
    results, compared = [], cluster
    for name in SYSTEMS:
        how, own, settings = tuned(fleet, cluster, name)
        (result,) = packer.compare_systems(fleet, own, [how], seeds=SEEDS)
        results.append(result)
        compared = own if name == "affinity" else compared
        cells = []
        for key, _, digits in COLUMNS:
            row = result.figures[key]
            cells.append(f"{row.mean:,.{digits}f} ± {(row.high - row.low) / 2:,.{digits}f}")
        lines.append(f"| `{name}` | {settings} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", verdict(fleet, compared, results)])


def stale_table(fleet: packer.Workload, cluster: packer.Cluster) -> str:
    """One row per system that reads counts: the share of the requests that keep the SLO by the age of these."""
    lines = [
        "| system | settings | " + " | ".join(f"{age_s:g} s" for age_s in AGES_S) + " |",
        "|---" * (len(AGES_S) + 2) + "|",
    ]
    for name in ("affinity", "llm-d", "vllm"):
        how, own, settings = tuned(fleet, cluster, name)
        cells = []
        for age_s in AGES_S:
            (found,) = packer.compare_systems(fleet, own, [how], seeds=SEEDS, stats_age_s=age_s)
            row = found.figures["slo_attainment"]
            cells.append(f"{row.mean:.3f} ± {(row.high - row.low) / 2:.3f}")
        lines.append(f"| `{name}` | {settings} | " + " | ".join(cells) + " |")
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
    parser = argparse.ArgumentParser(description="Compare systems on four servers, and measure large clusters.")
    parser.add_argument(
        "--write", action="store_true", help="update README.md, docs/comparison.md and docs/performance.md"
    )
    parser.add_argument("--only", choices=("systems", "stale", "scale"), help="one of the tables")
    options = parser.parse_args()
    fleet, cluster = packer.read_workload(ROOT / FLEET), packer.read_cluster(ROOT / CLUSTER)
    if options.only in (None, "systems"):
        table = systems_table(fleet, cluster)
        print(table)
        if options.write:
            put(ROOT / "README.md", "systems", table)
    if options.only in (None, "stale"):
        table = stale_table(fleet, cluster)
        print(table)
        if options.write:
            put(ROOT / "docs/comparison.md", "stale counts", table)
    if options.only in (None, "scale"):
        table = scale_table()
        print(table)
        if options.write:
            put(ROOT / "docs/performance.md", "clusters", table)


if __name__ == "__main__":
    main()
