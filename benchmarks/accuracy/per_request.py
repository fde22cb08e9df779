"""An estimate against every request of a measured open loop: a real vLLM 0.19 with Llama-3.1-8B on an RTX 4090.

uv run python benchmarks/accuracy/per_request.py [--check]

300 ShareGPT requests at 10/s (casys-kaist/LLMServingSim, bench/examples, MIT, commit 5daddb2): far more than the server
takes, so that TTFT is mostly the queue.
"""

from __future__ import annotations

import argparse
import json
import sys

import numpy as np
from rows import LIBRARY

import packer
from packer.arrays import FloatArray

FOLDER = LIBRARY / "llmservingsim" / "RTX4090" / "Llama-3.1-8B"
BOUNDS = {"TTFT": 20.0, "TPOT": 8.0}
"""Error of the mean, and median error of a request, %, that `--check` holds."""


def measured() -> tuple[packer.RequestTrace, FloatArray, FloatArray]:
    """The requests as sent, and TTFT and TPOT of each, ms."""
    lines = [json.loads(line) for line in (FOLDER / "requests.jsonl").read_text("utf-8").splitlines()]
    names = ("queued_ts", "first_token_ts", "last_token_ts", "input_toks", "output_toks")
    sent, first, last, prompt, output = np.array([[line[name] for name in names] for line in lines]).T
    order = np.argsort(sent, kind="stable")
    begin = sent.min()
    sent, first, last = sent[order] - begin, first[order] - begin, last[order] - begin
    prompt, output = prompt[order], output[order]
    trace = packer.RequestTrace(sent, np.zeros(len(sent), int), prompt.astype(int), output.astype(int), end_s=1000.0)
    return trace, 1e3 * (first - sent), 1e3 * (last - first) / np.maximum(output - 1.0, 1.0)


def main() -> int:
    """Simulate, print a line for each metric, and check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit code 1 above the bounds")
    given = parser.parse_args()
    trace, ttft_ms, tpot_ms = measured()
    profile = packer.estimate_profile(
        "meta-llama/Llama-3.1-8B", "rtx4090", version="0.19.0", max_model_len=32768, max_num_seqs=256,
        max_num_batched_tokens=2048,
    )  # fmt: skip
    fleet = packer.Workload([packer.Adapter("base", rank=0, rate=1.0)], arrivals=packer.Arrivals("trace", trace=trace))
    run = packer.simulate(fleet, profile, max_loras=1, max_lora_rank=8, duration_s=1000.0, seed=0)
    sent, first, finish = (run.requests[name].to_numpy() for name in ("sent_s", "first_s", "finish_s"))
    gaps = np.maximum(trace.output_tokens - 1.0, 1.0)
    broken = False
    for name, real, found in (
        ("TTFT", ttft_ms, 1e3 * (first - sent)),
        ("TPOT", tpot_ms, 1e3 * (finish - first) / gaps),
    ):
        whole = 100.0 * (found.mean() / real.mean() - 1.0)
        half, nine = 100.0 * np.quantile(np.abs(found / real - 1.0), (0.5, 0.9))
        print(
            f"{name}: mean {found.mean():,.1f} ms, measured {real.mean():,.1f} ({whole:+.1f} %); of a request "
            f"{half:.1f} % median, {nine:.1f} % p90"
        )
        broken |= max(abs(whole), half) > BOUNDS[name]
    return int(given.check and broken)


if __name__ == "__main__":
    sys.exit(main())
