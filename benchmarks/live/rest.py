"""What `packer live follow` takes while nothing changes: 64 stand-in servers with 5,000 adapters, a look a minute.

uv run python benchmarks/live/rest.py
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import tempfile
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import packer
from packer.bin import Bin
from packer.live.act import Acting
from packer.live.fleet_file import Host, LiveFleet
from packer.operate.follow import Following, rows_of
from packer.plan import Plan, Status
from packer.predictors.twin import TwinPredictor
from packer.report.following import live_metrics, live_page
from tests.live.stand_in import StandIn

SERVERS, ADAPTERS, EVERY_S = 64, 5000, 60.0


def serve(names: list[list[str]], base: str, longest: int, out: Connection) -> None:
    """Stand-ins in a process of their own; their counters grow by themselves."""
    servers = [StandIn({n: f"/adapters/{n}" for n in own}, base) for own in names]
    for each in servers:
        each.longest = longest
    out.send([each.url for each in servers])
    started = time.monotonic()
    while True:
        tokens = int(800.0 * (time.monotonic() - started))
        for each in servers:
            each.counters = f"vllm:prompt_tokens_total {tokens}\nvllm:generation_tokens_total {tokens}\n"
        time.sleep(1.0)


def main() -> None:
    """Run some looks, of which the first ones don't count, and print CPU time and memory."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--looks", type=int, default=12)
    options = parser.parse_args()
    profile = packer.load_profile("h100-64gb/llama-3.1-8b-instruct")
    fleet = packer.Workload([packer.Adapter(f"a{k}", 8, 0.03) for k in range(ADAPTERS)])
    settings = profile.settings(32, 8)
    bins = tuple(Bin(tuple(range(s, ADAPTERS, SERVERS)), settings, profile) for s in range(SERVERS))
    figures = TwinPredictor(seed=0).evaluate(fleet, bins[:1])
    plan = Plan(fleet, bins, replace(figures), Status.FEASIBLE, "gpus", "greedy", "twin")
    ours, theirs = multiprocessing.Pipe()
    names = [[f"a{k}" for k in item.adapters] for item in bins]
    given = (names, profile.model.name, profile.engine.max_model_len, theirs)
    child = multiprocessing.Process(target=serve, args=given, daemon=True)
    child.start()
    hosts = tuple(Host(url) for url in ours.recv())
    with tempfile.TemporaryDirectory() as folder:
        acting = Acting(plan, LiveFleet(hosts, state=f"{folder}/state.json"))
        loop = Following(acting, fleet, EVERY_S)
        acting.adopt(acting.placement(acting.look()), "rest")
        spent = []
        for k in range(options.looks):
            before = time.process_time()
            made = loop.step(k * EVERY_S)
            page = live_metrics(loop, rows := rows_of(loop)) + live_page(loop, rows)
            for _ in range(3):
                loop._lost()  # noqa: SLF001 - as `run` does between two looks
            spent.append(time.process_time() - before)
            print(
                f"look {k}: {spent[-1]:.3f} s, {len(made)} changes, page {len(page):,} characters", flush=True
            )
            time.sleep(1.0)
        rest = spent[len(spent) // 2 :]
        share = sum(rest) / len(rest) / EVERY_S
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"at rest {share:.2%} of a core at a look each {EVERY_S:g} s, {peak:.0f} MiB")


if __name__ == "__main__":
    main()
