"""Hit rates of prefix caching: a real server on the CPU with today's defaults, and the twin on the same requests.

    python benchmarks/real_vllm/prefixes.py vllm-cpu/launch.toml FOLDER

starts a server with prefix caching and asynchronous scheduling on, sends prompts that share a system prompt within
each adapter for 60 s, then sessions whose turns repeat the server's own answers, and writes `results/prefixes.json`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from packer.adapter import Adapter
from packer.bin import Bin
from packer.io.profiles import load_profile
from packer.lengths import Lengths
from packer.live.launch import read_launch
from packer.live.validate import Validation, ValidationSpec
from packer.sessions import Sessions
from packer.testing.records import record_text
from packer.workload import Workload

WRITTEN = ("prefix_hit_rate", "total_token_throughput", "preemptions")
"""Figures that do not depend on what else the machine does, as latencies on a CPU do."""
RESULTS = Path(__file__).parent / "results"


SHARED = Workload(
    [Adapter(f"a{i}", 8, 2.0, shared_prefix_tokens=tokens) for i, tokens in enumerate((96, 64, 0))],
    Lengths.gamma(130, 0.3),
    Lengths.gamma(16, 0.5),
)
TALKS = Workload(
    [Adapter(f"a{i}", 8, 1.5) for i in range(3)],
    Lengths.gamma(50, 0.4),
    Lengths.gamma(14, 0.4),
    sessions=Sessions(turns=3.0, think_s=2.0, turn_tokens=16),
)


def main(launch_path: str, folder: str) -> None:
    """Run the server once for each workload and write both sides of every figure."""
    launch, profile = read_launch(launch_path), load_profile(str(RESULTS / "profile.toml"))
    server = Bin((0, 1, 2), profile.settings(3, 8), profile)
    found: dict[str, object] = {"vllm": profile.engine.version}
    for name, fleet in (("shared prefixes", SHARED), ("sessions", TALKS)):
        spec = ValidationSpec(60.0, 1, 1, 0, ())
        job = Validation(launch, fleet, [server], Path(folder) / name[:6], spec, lambda *_progress: None)
        job.run()
        report = job.reports[0]
        figures = {key: [report.mean(side, key) for side in ("predicted", "measured")] for key in WRITTEN}
        found[f"{name}: predicted, measured"] = figures
    text = record_text(found)
    (RESULTS / "prefixes.json").write_text(text + "\n", "utf-8")
    print(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
