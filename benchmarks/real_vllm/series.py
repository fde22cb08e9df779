"""Time series and time of /metrics on real vLLM against the sets of adapters that a server has seen.

    python benchmarks/real_vllm/series.py --launch vllm-cpu/launch.toml    # four servers, about 16 minutes

Servers: as vLLM is; with the series of an hour of traffic at the start (plug-in aged_lora_series), loads with and
without scrapes in turn; with the plug-in one_lora_series; with --disable-log-stats. Results: results/series.{json,md}.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from packer import Adapter, Lengths, Workload
from packer.live.launch import Launch, read_launch
from packer.live.load import LoadJob, run_job
from packer.live.server import LiveServer, ServerOptions, get
from packer.settings import Settings
from packer.testing.records import record_text
from packer.twin.arrivals import draw_requests

sys.path.insert(0, str(Path(__file__).parent))
from machine import machine

RESULTS = Path(__file__).parent / "results"
PLUGINS = Path(__file__).parent / "plugins"
RANK = 8
KV_CACHE_BYTES = 64_000_000
INPUT, OUTPUT = Lengths.gamma(32.0, 0.6, high=100), Lengths.gamma(48.0, 0.6, high=100)
SCRAPE_S = 2.0
IDLE_SCRAPES = 7
SCRAPE_TIMEOUT_S = 60.0
LABEL = re.compile(r'running_lora_adapters="([^"]*)"')


@dataclass(frozen=True)
class Stage:
    """One load: `adapters` of equal rate, `rate` req/s in all, with or without a scrape every `SCRAPE_S`."""

    adapters: int
    rate: float
    scraped: bool


STAGES = (
    Stage(4, 10.0, False),
    *(Stage(48, rate, scraped) for rate in (8.0, 20.0) for scraped in (False, True) for _ in range(2)),
)
VARIANTS = ("vllm", "aged", "one-series", "no-stats")
PLUGIN = {"aged": "aged_lora_series", "one-series": "one_lora_series"}
AGED_SERIES = 40_000
AGED_STAGES = tuple(Stage(48, 12.0, scraped) for scraped in (False, True) * 3)


def launch_of(launch: Launch, variant: str) -> Launch:
    """The launch file with the variant's plug-in or flag, without a step log."""
    environment = {
        "PYTHONPATH": str(PLUGINS),
        "VLLM_PLUGINS": PLUGIN.get(variant, "none"),
        "PACKER_AGED_SERIES": str(AGED_SERIES),
    }
    extra = ("--disable-log-stats",) if variant == "no-stats" else ()
    return replace(
        launch, step_log=False, arguments=(*launch.arguments, *extra), environment={**launch.environment, **environment}
    )


def scrape(url: str) -> tuple[float, str]:
    """Milliseconds and text of /metrics."""
    start = time.monotonic()
    status, text = get(url, "/metrics", SCRAPE_TIMEOUT_S)
    if status != 200:
        raise SystemExit(f"/metrics answered with status {status}")
    return (time.monotonic() - start) * 1e3, text


def scrape_until(url: str, stop: threading.Event, times_ms: list[float]) -> None:
    """Scrape at the interval of `SCRAPE_S` until stopped."""
    while not stop.wait(SCRAPE_S):
        times_ms.append(scrape(url)[0])


def run_stage(server: LiveServer, launch: Launch, stage: Stage, seconds: float, seed: int, folder: Path) -> Any:
    """Send one load; returns what the client saw and the times of the scrapes meanwhile, ms."""
    fleet = Workload(
        [Adapter(f"a{i}", RANK, stage.rate / stage.adapters) for i in range(stage.adapters)], INPUT, OUTPUT, 0.0
    )
    job = LoadJob(
        server.url,
        tuple(fleet.names),
        draw_requests(fleet, seconds, seed),
        seconds,
        token_ids=launch.token_ids,
        seed=seed,
        metrics_interval_s=0.0,
        cores=launch.client_cores,
    )
    stop, times_ms = threading.Event(), list[float]()
    scraper = threading.Thread(target=scrape_until, args=(server.url, stop, times_ms))
    if stage.scraped:
        scraper.start()
    try:
        load = run_job(job, folder, alive=lambda: server.alive)
    finally:
        stop.set()
        if stage.scraped:
            scraper.join()
    if not load.complete:
        raise SystemExit(f"{folder}: {load.ended}")
    return load, times_ms


def measure(launch: Launch, variant: str, work: Path, seconds: float, say: Callable[[str], None]) -> list[Any]:
    """Rows of one server, a row per stage."""
    launch = launch_of(launch, variant)
    adapters = max(stage.adapters for stage in STAGES)
    names = tuple((f"a{i}", launch.adapter_folder(f"a{i}", RANK)) for i in range(adapters))
    rows = []
    with LiveServer(launch, ServerOptions(names, Settings(adapters, RANK), KV_CACHE_BYTES), work / variant) as server:
        failure = server.start()
        if failure is not None:
            raise SystemExit(f"{variant}: {failure.message}\n{failure.tail}")
        for number, stage in enumerate(AGED_STAGES if variant == "aged" else STAGES):
            load, times_ms = run_stage(server, launch, stage, seconds, number, work / variant / f"stage-{number}")
            idle = [scrape(server.url) for _ in range(IDLE_SCRAPES)]
            text = idle[-1][1]
            labels = LABEL.findall(text)
            rows.append(
                {
                    "variant": variant,
                    **stage.__dict__,
                    "requests": int(np.isfinite(load.sent_s).sum()),
                    "series": len(labels),
                    "distinct_sets": len({frozenset(label.split(",")) for label in labels}),
                    "names_in_series": sum(len(label.split(",")) for label in labels if label),
                    "bytes": len(text),
                    "idle_scrape_ms": float(np.median([ms for ms, _ in idle])),
                    "loaded_scrape_ms": float(np.median(times_ms)) if times_ms else None,
                    "mean_itl_ms": float(load.itl_ms.mean()),
                    "median_itl_ms": float(np.median(load.itl_ms)),
                    "p99_itl_ms": float(np.quantile(load.itl_ms, 0.99)),
                    "p999_itl_ms": float(np.quantile(load.itl_ms, 0.999)),
                    "mean_ttft_ms": float(load.ttft_ms.mean()),
                    "throughput_tok_s": load.total_token_throughput,
                }
            )
            say(json.dumps(rows[-1]))
    return rows


def render_law(python: str) -> dict[str, Any]:
    """CPU time of a page, ms = series_ms·series + character_ms·characters, by non-negative least squares."""
    script = str(Path(__file__).with_name("render.py"))
    rows = json.loads(subprocess.run([python, script], capture_output=True, text=True, check=True).stdout)
    table = np.array([[row["series"], row["characters"]] for row in rows], dtype=np.float64)
    times = np.array([row["cpu_ms"] for row in rows])
    scale = table.max(axis=0)
    found, _ = nnls(table / scale / times[:, None], np.ones(len(rows)))
    error = np.abs(table @ (found / scale) / times - 1.0)
    series, character = (found / scale).tolist()
    return {"series_ms": series, "character_ms": character, "mean_relative_error": float(error.mean()), "rows": rows}


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table for people."""
    head = ["server", "adapters", "req/s", "scraped", "series", "distinct sets", "names per series", "MB"]
    head += ["/metrics idle, ms", "loaded, ms", "ITL median / mean / p99.9, ms"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for r in rows:
        loaded = "–" if r["loaded_scrape_ms"] is None else f"{r['loaded_scrape_ms']:.0f}"
        cells = [r["variant"], str(r["adapters"]), f"{r['rate']:g}", "yes" if r["scraped"] else "no"]
        cells += [str(r["series"]), str(r["distinct_sets"])]
        cells += [f"{r['names_in_series'] / max(r['series'], 1):.1f}", f"{r['bytes'] / 1e6:.2f}"]
        cells += [f"{r['idle_scrape_ms']:.1f}", loaded]
        cells += [f"{r['median_itl_ms']:.1f} / {r['mean_itl_ms']:.1f} / {r['p999_itl_ms']:.0f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure the variants that are missing and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launch", required=True, help="launch file, see `packer live setup-cpu`")
    parser.add_argument("--work", default="build/real_vllm/series", help="where measurements are kept")
    parser.add_argument("--results", default=str(RESULTS), help="where the figures go")
    parser.add_argument("--seconds", type=float, default=25.0, help="length of each load")
    parser.add_argument("--servers", type=int, default=len(VARIANTS), help="start at most so many servers")
    arguments = parser.parse_args()
    work, results = Path(arguments.work), Path(arguments.results)
    work.mkdir(parents=True, exist_ok=True)
    results.mkdir(parents=True, exist_ok=True)
    launch = read_launch(arguments.launch)
    rows: list[dict[str, Any]] = []
    left = arguments.servers
    for variant in VARIANTS:
        kept = work / f"{variant}.json"
        if not kept.exists() and left > 0:
            left -= 1
            found = measure(launch, variant, work, arguments.seconds, lambda line: print(line, flush=True))
            kept.write_text(json.dumps(found))
        if kept.exists():
            rows += json.loads(kept.read_text())
    data = {"machine": machine(), "render": render_law(launch.python), "rows": rows}
    (results / "series.json").write_text(record_text(data) + "\n", "utf-8")
    (results / "series.md").write_text(markdown(rows))
    print(json.dumps(data["render"]), markdown(rows), sep="\n")


if __name__ == "__main__":
    main()
