"""Hit rates of prefix caching: a real server on the CPU with today's defaults, and the twin on the same requests.

    python benchmarks/real_vllm/prefixes.py vllm-cpu/launch.toml FOLDER

starts a server with prefix caching and asynchronous scheduling on, sends prompts that share a system prompt within
each adapter for 40 s, and writes `results/prefixes.json`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from packer.adapter import Adapter
from packer.bin import Bin
from packer.io.profiles import load_profile
from packer.lengths import Lengths
from packer.live.launch import read_launch
from packer.live.validate import COMPARED, Validation, ValidationSpec
from packer.workload import Workload

RESULTS = Path(__file__).parent / "results"


def main(launch_path: str, folder: str) -> None:
    """Run the server once and write both sides of every figure."""
    launch, profile = read_launch(launch_path), load_profile(str(RESULTS / "profile.toml"))
    plain = tuple(word for word in launch.arguments if word != "--no-enable-prefix-caching")
    fleet = Workload(
        [Adapter(f"a{i}", 8, 2.0, shared_prefix_tokens=tokens) for i, tokens in enumerate((96, 64, 0))],
        Lengths.gamma(130, 0.3),
        Lengths.gamma(16, 0.5),
    )
    server = Bin((0, 1, 2), profile.settings(3, 8), profile)
    spec = ValidationSpec(40.0, 1, 1, 0, ())
    job = Validation(
        replace(launch, arguments=plain), fleet, [server], Path(folder), spec, lambda *_progress: None
    )
    job.run()
    report = job.reports[0]
    figures = {name: [report.mean(side, name) for side in ("predicted", "measured")] for name in COMPARED}
    text = json.dumps({"vllm": profile.engine.version, "predicted, measured": figures}, indent=1)
    (RESULTS / "prefixes.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
