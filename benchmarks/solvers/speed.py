"""How fast the solvers are, inside a running process, against what they should take.

Times are CPU seconds; the peak is that of the process by then, cases are in the order of their size.

uv run python benchmarks/solvers/speed.py --write     # into benchmarks/solvers/speed.json
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import numpy as np
from run import HERE, machine
from suite import LLAMA

import packer
from packer.io.files import write_text
from packer.planning.solve import solve
from packer.strategies import Predictor
from packer.testing.records import record_text

PAPER_RATES, PAPER_RANKS = (0.4, 0.2, 0.1), (8, 16)
QUIET_RATES = (0.05, 0.025, 0.01, 0.005)


def fleet(n: int, rates: Sequence[float] = PAPER_RATES) -> packer.Workload:
    """`n` adapters with the paper's kinds of rates and ranks."""
    rng = np.random.default_rng(n)
    return packer.Workload(
        [packer.Adapter(f"a{i}", int(rng.choice(PAPER_RANKS)), float(rng.choice(rates))) for i in range(n)]
    )


def best_of(repeats: int, work: Callable[[], object]) -> float:
    """Shortest CPU time of so many repetitions, s."""
    taken = []
    for _ in range(repeats):
        started = time.process_time()
        work()
        taken.append(time.process_time() - started)
    return min(taken)


def milliseconds(seconds: float) -> str:
    """For people."""
    return f"{seconds * 1e3:.2f} ms" if seconds < 0.01 else f"{seconds * 1e3:.1f} ms"


def cases() -> list[dict[str, str]]:
    """Each case with its limit and what it took."""
    profile = packer.load_profile(LLAMA)
    four = fleet(384)
    forest, tree = packer.load_predictor("forest", profile), packer.load_predictor("tree", profile)
    found = []

    def case(name: str, limit: str, repeats: int, work: Callable[[], packer.Plan]) -> None:
        plans: list[packer.Plan] = []
        seconds = best_of(repeats, lambda: plans.append(work()))
        shown = milliseconds(seconds) if seconds < 1.0 else f"{seconds:.2f} s"
        peak = f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MB"
        found.append({"case": f"{name} ({plans[-1].n_gpus} GPUs)", "limit": limit, "taken": shown, "peak": peak})

    def greedy(workload: packer.Workload, predictor: Predictor) -> Callable[[], packer.Plan]:
        return lambda: solve(workload, profile, predictor=predictor, verify=False)

    case("greedy, 384 adapters, tree", "5 ms", 20, greedy(four, tree))
    case("greedy, 1,024 adapters, tree", "0.1 s", 3, greedy(fleet(1024), tree))
    case("greedy, 4,096 adapters, tree", "0.3 s", 3, greedy(fleet(4096), tree))
    case("greedy, 20,000 adapters, tree", "3 s", 1, greedy(fleet(20_000), tree))
    case("greedy, 100,000 adapters, tree", "6 s", 1, greedy(fleet(100_000), tree))
    boosting = packer.load_predictor("boosting", profile)
    case("greedy, 100,000 quiet adapters, boosting", "6 s", 1, greedy(fleet(100_000, QUIET_RATES), boosting))
    case("greedy, 384 adapters, forest", "50 ms", 5, greedy(four, forest))
    case("greedy, 4,096 adapters, forest", "5 s", 1, greedy(fleet(4096), forest))
    case(
        "dlora, 384 adapters on 4 GPUs",
        "2 s",
        3,
        lambda: solve(four, profile, objective="latency", solver="dlora", predictor=forest, max_gpus=4, verify=False),
    )
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print or write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(argv)
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    text = record_text({"machine": machine(), "date": date, "cases": cases()})
    if options.write:
        write_text(HERE / "speed.json", text + "\n", force=True)
    else:
        print(text)


if __name__ == "__main__":
    main()
