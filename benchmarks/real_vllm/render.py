"""CPU time of rendering vllm:lora_requests_info; run by series.py with the interpreter of vLLM's environment.

Prints JSON: rows of series, names per label, characters of the page and CPU milliseconds (smallest of three).
CPU time, because it does not depend on what else runs on the machine.
"""

from __future__ import annotations

import json
import time

from prometheus_client import CollectorRegistry, Gauge, generate_latest

SIZES = ((500, 8), (2000, 8), (500, 32), (2000, 32), (500, 128), (2000, 128))
REPEATS = 3


def cpu_ms(registry: CollectorRegistry) -> tuple[float, int]:
    """CPU milliseconds and characters of one rendering."""
    start = time.thread_time()
    page = generate_latest(registry)
    return (time.thread_time() - start) * 1e3, len(page)


def main() -> None:
    """Measure every size with a registry of its own."""
    rows = []
    for series, names in SIZES:
        registry = CollectorRegistry()
        labels = ["max_lora", "waiting_lora_adapters", "running_lora_adapters"]
        gauge = Gauge("vllm:lora_requests_info", "Running stats on lora requests.", labels, registry=registry)
        for i in range(series):
            text = ",".join(f"adapter-{(i * 7 + k) % 512}-{i}" for k in range(names))
            gauge.labels(max_lora=64, waiting_lora_adapters=text, running_lora_adapters=text).set(1.0)
        times = [cpu_ms(registry) for _ in range(REPEATS)]
        best, characters = min(times)
        rows.append({"series": series, "names": names, "characters": characters, "cpu_ms": best})
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
