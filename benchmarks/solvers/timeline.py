"""Which hours a decision simulates, when, and in which thread: what the other cores could do meanwhile.

    uv run python benchmarks/solvers/timeline.py examples/workloads/azure-conv-2023.csv

One line for each simulated hour: when it began and ended (s), its CPU time (s), its thread, the adapters and slots of
the server, the seed, whether it ran to its end, and which functions of the planner began it ("later": before anything
waited for it). The last lines sum up the hours by these functions, and for how long how many hours ran at once.
"""

from __future__ import annotations

import argparse
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import packer
import packer.planning.recommend
from packer.bin import Bin
from packer.twin import hours
from packer.twin.threads import Workers


@dataclass(frozen=True, order=True)
class Hour:
    """One simulated hour."""

    start_s: float
    end_s: float
    cpu_s: float
    thread: str
    server: str
    ended: str
    by: str


def watched(found: list[Hour], started_s: float) -> None:
    """From now on note each simulated hour."""
    begin, run, asked = Workers.begin, hours._run, threading.local()  # noqa: SLF001

    def named_begin(self: Workers, task: Callable[[], Any], *, later: bool = False) -> Any:
        frames = [each for each in traceback.extract_stack() if "planning" in Path(each.filename).parts]
        by = ("later " if later else "") + " > ".join(dict.fromkeys(each.name for each in frames[-4:]))

        def named() -> Any:
            asked.by = by
            return task()

        return begin(self, named, later=later)

    def noted_run(item: Bin, fleet: packer.Workload, seed: int, watch: Any = None) -> Any:
        clock_s, cpu_s, ended = time.perf_counter(), time.thread_time(), "broken"
        try:
            result = run(item, fleet, seed, watch)
            ended = "whole"
            return result
        finally:
            server = f"{len(item.adapters)} adapters, {item.max_loras} slots, seed {seed}"
            now_s = time.perf_counter() - started_s
            found.append(
                Hour(
                    clock_s - started_s, now_s, time.thread_time() - cpu_s, threading.current_thread().name,
                    server, ended, getattr(asked, "by", ""),
                )
            )  # fmt: skip

    Workers.begin, hours._run = named_begin, noted_run  # type: ignore[assignment, method-assign]  # noqa: SLF001


def at_once(found: Sequence[Hour]) -> Counter[int]:
    """Seconds in which so many hours ran at once, from the first one to the last."""
    edges = sorted([(hour.start_s, 1) for hour in found] + [(hour.end_s, -1) for hour in found])
    running, sums = 0, Counter[int]()
    for (now_s, change), (next_s, _) in pairwise(edges):
        running += change
        sums[running] += next_s - now_s  # type: ignore[assignment]
    return sums


def main() -> None:
    """Plan, and print the hours."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("workload", type=Path)
    parser.add_argument("--profile", default="h100-64gb/llama-3.1-8b-instruct")
    options = parser.parse_args()
    fleet, profile = packer.read_workload(options.workload), packer.load_profile(options.profile)
    found: list[Hour] = []
    watched(found, time.perf_counter())
    plan = packer.recommend(fleet, profile)
    threads = {name: k for k, name in enumerate(dict.fromkeys(hour.thread for hour in sorted(found)))}
    for hour in sorted(found):
        print(
            f"{hour.start_s:7.3f} {hour.end_s:7.3f} {hour.cpu_s:6.3f} thread {threads[hour.thread]}  "
            f"{hour.server:32} {hour.ended:6} {hour.by}"
        )
    number, cpu_s = Counter(hour.by for hour in found), Counter[str]()
    for hour in found:
        cpu_s[hour.by] += hour.cpu_s  # type: ignore[assignment]
    for by, taken_s in cpu_s.most_common():
        print(f"{number[by]:5} hours {taken_s:7.2f} s  {by}")
    for running, sum_s in sorted(at_once(found).items()):
        print(f"{running} at once for {sum_s:.2f} s")
    print(f"{plan.n_gpus} GPUs, {len(found)} hours, {sum(cpu_s.values()):.2f} s of CPU time in them")


if __name__ == "__main__":
    main()
