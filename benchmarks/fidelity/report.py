"""Write docs/fidelity.md, details.md, pictures and the README's table from what its neighbours found.

uv run python benchmarks/fidelity/report.py
"""

from __future__ import annotations

import csv
import gzip
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from h100 import DATA, MAX_OUTSTANDING, MODELS, ROOT, tables

from packer.arrival import Arrivals
from packer.fit.runs import fleet_of
from packer.fit.tables import MeasuredRun
from packer.io.files import write_text
from packer.io.profiles import load_profile
from packer.report.figures import Figure, Line, Panel, Scatter, write_figure
from packer.twin.arrivals import draw_requests
from packer.twin.run import Run
from packer.twin.scores import macro_f1, smape
from packer.twin.simulate import simulate
from packer.workload import Workload

HERE = Path(__file__).parent
IMAGES = ROOT / "docs" / "images"
SHORT = {"llama-3.1-8b-instruct": "llama", "qwen-2.5-7b-instruct": "qwen"}
OVERLAYS = {
    "light": "ml_test__llama-3.1-8b-instruct__rate_0.4-0.05-0.025_size_8-8-32__96_96_32",
    "queueing": "twin_test__llama-3.1-8b-instruct__rank_16_rates_0.1_0.05_0.025__32_256_16",
    "starved": "twin_test__llama-3.1-8b-instruct__rank_16_rates_0.1_0.05_0.025__128_320_16",
}
METRIC_NAMES = {
    "throughput": "throughput", "tpot": "TPOT", "itl": "ITL", "ttft": "mean TTFT", "ttft_median": "median TTFT",
}  # fmt: skip


def _prose(part: str) -> str:
    """Words of the page that no script can write."""
    return (HERE / "prose" / f"{part}.md").read_text().rstrip()


def _number(value: float | None) -> str:
    return "–" if value is None or value != value else f"{value:.2f}"


def regime_table(regimes: dict[str, dict[str, float]], floor: dict[str, dict[str, float]] | None = None) -> list[str]:
    """SMAPE by regime, as a Markdown table; the floor in brackets, where it is given."""
    lines = ["| regime | runs | " + " | ".join(METRIC_NAMES.values()) + " |"]
    lines.append("|---|---|" + "---|" * len(METRIC_NAMES))
    for regime, errors in regimes.items():
        cells = [_number(errors.get(name)) for name in METRIC_NAMES]
        if floor is not None:
            chance = floor[regime]
            cells = [f"{cell} ({_number(chance[name])})" for cell, name in zip(cells, METRIC_NAMES, strict=True)]
        lines.append(f"| {regime} | {int(errors['n'])} | " + " | ".join(cells) + " |")
    return lines


def peer_table(found: dict[str, Any]) -> list[str]:
    """Ours, held out, against the paper's twin on the runs that it replayed."""
    lines = ["| model | runs | | throughput | ITL | starvation macro F1 |", "|---|---|---|---|---|---|"]
    peers = {row["run_id"]: row for row in csv.DictReader((DATA / "peer_twin.csv").open())}
    for model in MODELS:
        measured = {run.run_id: run for run in tables(model)[1] if run.ok}
        rows = [
            (row["predicted"], peers[row["run_id"]], measured[row["run_id"]], row["starved"])
            for row in found[model]["held_out"]["runs"]
            if row["run_id"] in peers and row["run_id"] in measured and row["predicted"]
            and peers[row["run_id"]]["sim_total_throughput"]
        ]  # fmt: skip
        ours = (
            smape((p["throughput"], run.metrics["total_tok_s"]) for p, _, run, _ in rows),
            smape((p["itl"], run.metrics["itl_mean_ms"]) for p, _, run, _ in rows),
            macro_f1([(starved, run.starved) for _, _, run, starved in rows]),
        )
        theirs = (
            smape((float(peer["sim_total_throughput"]), run.metrics["total_tok_s"]) for _, peer, run, _ in rows),
            smape((float(peer["sim_itl"]), run.metrics["itl_mean_ms"]) for _, peer, run, _ in rows),
            macro_f1(
                [
                    (float(peer["sim_total_throughput"]) < 0.9 * run.offered_tok_s, run.starved)
                    for _, peer, run, _ in rows
                ]
            ),
        )
        for who, (throughput, itl, f1) in (("packer, held out", ours), ("the paper's twin", theirs)):
            lines.append(f"| {model} | {len(rows)} | {who} | {throughput:.2f} | {itl:.2f} | {f1:.3f} |")
    return lines


def trials_tables(trials: dict[str, Any]) -> list[str]:
    """The trials of effects, as Markdown."""
    lines = ["| effect | used | " + " | ".join(f"{SHORT[m]}: without → with" for m in MODELS) + " |"]
    lines.append("|---|---|---|---|")
    for rows in zip(*(trials[model]["terms"] for model in MODELS), strict=True):
        cells = [f"{row['without']:.2f} → {row['with']:.2f}" for row in rows]
        lines.append(f"| {rows[0]['effect']} | {'yes' if rows[0]['used'] else 'no'} | " + " | ".join(cells) + " |")
    header = " | ".join(f"{SHORT[m]}: throughput / TPOT / ITL / TTFT" for m in MODELS)
    lines += ["", f"| twin with | {header} |", "|---|---|---|"]
    for variant in trials[MODELS[0]]["twin"]:
        cells = [
            " / ".join(f"{trials[m]['twin'][variant][name]:.1f}" for name in ("throughput", "tpot", "itl", "ttft"))
            for m in MODELS
        ]
        lines.append(f"| {variant} | " + " | ".join(cells) + " |")
    return lines


def variants_table(variants: dict[str, Any]) -> list[str]:
    """The variants of the fit on families left out, as Markdown."""
    parts = {
        "TTFT, queueing": ("queueing", "ttft"), "few wait": ("few wait", "ttft"), "many wait": ("many wait", "ttft"),
        "TPOT, queueing": ("queueing", "tpot"), "throughput, starved": ("starved", "throughput"),
    }  # fmt: skip
    lines = ["| fit | step | " + " | ".join(parts) + " | F1 |", "|---|---|" + "---|" * (len(parts) + 1)]
    for variant in variants[MODELS[0]]:
        rows = [variants[model][variant] for model in MODELS]
        cells = [" / ".join(f"{row['step']:.2f}" for row in rows)]
        cells += [" / ".join(f"{row[regime][name]:.1f}" for row in rows) for regime, name in parts.values()]
        cells.append(" / ".join(f"{row['F1']:.3f}" for row in rows))
        lines.append(f"| {variant} | " + " | ".join(cells) + " |")
    return lines


def parity(model: str, rows: list[dict[str, Any]], runs: dict[str, MeasuredRun]) -> str:
    """Picture of predicted against measured; returns its file name."""
    panels = []
    for name, column, label in (
        ("throughput", "total_tok_s", "throughput, tok/s"),
        ("tpot", "tpot_mean_ms", "TPOT, ms"),
        ("ttft", "ttft_mean_ms", "mean TTFT, ms"),
    ):
        series: list[Any] = []
        everything: list[float] = []
        for regime in ("light", "queueing", "starved"):
            pairs = [
                (runs[row["run_id"]].metrics[column], row["predicted"][name])
                for row in rows
                if row["regime"] == regime and row["predicted"]
            ]
            everything += [value for pair in pairs for value in pair]
            series.append(Scatter([p[0] for p in pairs], [p[1] for p in pairs], label=regime))
        ends = [min(everything), max(everything)]
        series.append(Line(ends, ends, label="exact", dashed=True))
        panels.append(Panel(series, title=label, x_label="measured", y_label="predicted", x_log=True, y_log=True))
    path = IMAGES / f"fidelity-parity-{SHORT[model]}.png"
    write_figure(Figure(panels, title=f"{model}: families left out of the fit", columns=3), path)
    return path.name


def overlay(regime: str, run_id: str) -> str | None:
    """Picture of a run's measured and simulated state over time; None where its time series is not at hand."""
    source = DATA / "timeseries" / f"{run_id}.csv.gz"
    if not source.exists():
        return None
    model = run_id.split("__")[1]
    run = next(run for run in tables(model)[1] if run.run_id == run_id)
    sim = simulate(
        fleet_of(run), load_profile(f"h100-64gb/{model}"), max_loras=run.max_loras,
        max_lora_rank=run.max_lora_rank, duration_s=run.duration_s, max_outstanding=MAX_OUTSTANDING,
    )  # fmt: skip
    with gzip.open(source, "rt") as file:
        measured = list(csv.DictReader(file))
    frame = sim.timeline
    panels = []
    for title, column, ours in (
        ("running requests", "num_running", "running"),
        ("waiting requests", "num_waiting", "waiting"),
        ("KV cache in use", "kv_usage", "kv_usage"),
    ):
        pairs = [(float(row["t"]), float(row[column])) for row in measured if row[column]]
        panels.append(
            Panel(
                [
                    Line([p[0] for p in pairs], [p[1] for p in pairs], label="measured"),
                    Line(frame["time_s"].to_list(), frame[ours].to_list(), label="twin"),
                ],
                title=title,
                x_label="time, s",
            )
        )
    path = IMAGES / f"fidelity-{regime}.png"
    write_figure(Figure(panels, title=f"{regime}: {run.max_loras} slots, {len(run.rates)} adapters", columns=3), path)
    return path.name


def unpredictable_table() -> list[str]:
    """What unpredictable arrivals do, at the same mean rates (no measured runs of it are at hand)."""
    model = MODELS[0]
    lines = [
        "| run (slots, adapters) | arrivals | throughput / offered | mean TTFT, ms | p99 TTFT, ms | mean ITL, ms |",
        "|---|---|---|---|---|---|",
    ]
    runs = {run.run_id: run for run in tables(model)[1]}
    for run_id in OVERLAYS.values():
        run = runs[run_id]
        for kind in ("Poisson at the realised mean rates", "unpredictable"):
            sims = [_arriving(run, kind == "unpredictable", seed) for seed in range(5)]
            share = sum(s.total_token_throughput / s.offered_tok_s for s in sims) / 5
            names = ("mean_ttft_ms", "p99_ttft_ms", "mean_itl_ms")
            cells = [sum(getattr(s, name) for s in sims) / 5 for name in names]
            lines.append(
                f"| {run.max_loras}, {len(run.rates)} | {kind} | {share:.3f} | "
                + " | ".join(f"{c:,.0f}" for c in cells)
                + " |"
            )
    return lines


def _arriving(run: MeasuredRun, unpredictable: bool, seed: int) -> Run:
    """The run under unpredictable arrivals at half its rates, or under Poisson ones of the same mean rates."""
    fleet = fleet_of(run).scaled(0.5).with_arrivals(Arrivals("unpredictable"))
    if not unpredictable:
        sent = np.bincount(draw_requests(fleet, run.duration_s, seed).adapter, minlength=len(fleet))
        adapters = [
            replace(adapter, rate=max(n, 0.5) / run.duration_s)
            for adapter, n in zip(fleet.adapters, sent.tolist(), strict=True)
        ]
        fleet = Workload(adapters, fleet.input_tokens, fleet.output_tokens, fleet.length_correlation)
    return simulate(
        fleet, load_profile(f"h100-64gb/{MODELS[0]}"), max_loras=run.max_loras, max_lora_rank=run.max_lora_rank,
        duration_s=run.duration_s, seed=seed, max_outstanding=MAX_OUTSTANDING,
    )  # fmt: skip


def readme_block(found: dict[str, Any]) -> str:
    """The short table of the README."""
    lines = [
        "Held-out error on 678 one-hour runs of real vLLM on an H100 (SMAPE in %, 0–200 form; families that the",
        "calibration had not seen; only rates, ranks and mean lengths are known beforehand):", "",
        "| model | throughput | TPOT | ITL | TTFT, queueing or starved | starvation macro F1 | memory errors wrong |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for model in MODELS:
        e = found[model]["held_out"]["summary"]
        lines.append(
            f"| {model} | {e['throughput_smape']:.1f} | {e['tpot_smape']:.1f} | {e['itl_smape']:.1f} | "
            f"{e['ttft_queued_smape']:.1f} | {e['starvation_macro_f1']:.3f} | {int(e['memory_verdicts_wrong'])} |"
        )
    lines += ["", "More, with the paper's own twin on the same runs: [docs/fidelity.md](docs/fidelity.md)."]
    return "\n".join(lines)


def write_readme(found: dict[str, Any]) -> None:
    """Put the short table between the README's marks."""
    path = ROOT / "README.md"
    begin, end = "<!-- fidelity -->\n", "<!-- end of fidelity -->"
    before, rest = path.read_text().split(begin)
    write_text(path, before + begin + readme_block(found) + "\n" + end + rest.split(end)[1], force=True)


def main() -> None:
    """Write the page and the details."""
    found = json.loads((HERE / "held_out.json").read_text())
    trials = json.loads((HERE / "trials.json").read_text())
    page = [_prose("head"), "", "## Against the paper's twin, on the same runs", "", *peer_table(found), ""]
    more = ["# How accurate the twin is: details", "", _prose("details"), ""]
    for model in MODELS:
        runs = {run.run_id: run for run in tables(model)[1]}
        summary = found[model]["held_out"]["summary"]
        by_seed = ", ".join(f"{e['starvation_macro_f1']:.3f}" for e in found[model]["held_out"]["by_seed"])
        page += [
            f"## {model}", "",
            f"Families left out of the fit ({int(summary['runs'])} runs; starvation macro F1 "
            f"{summary['starvation_macro_f1']:.3f}, by seed {by_seed}, floor "
            f"{found[model]['floor']['all']['starvation_macro_f1']:.3f}; memory errors wrong: "
            f"{int(summary['memory_verdicts_wrong'])}); in brackets the floor:", "",
            *regime_table(found[model]["held_out"]["regimes"], found[model]["floor"]), "",
            f"![Predicted against measured](images/{parity(model, found[model]['held_out']['runs'], runs)})", "",
        ]  # fmt: skip
        more += [
            f"## {model}, calibrated on micro-benchmarks alone", "",
            f"No run seen; starvation macro F1 {found[model]['micro']['summary']['starvation_macro_f1']:.3f}:", "",
            *regime_table(found[model]["micro"]["regimes"]), "",
        ]  # fmt: skip
    more += [
        "## Over time",
        "",
        "The same rates, other random arrivals: the level counts, not each wave.",
        "",
    ]
    for regime, run_id in OVERLAYS.items():
        name = overlay(regime, run_id)
        if name:
            more += [f"![A {regime} run](../../docs/images/{name})", ""]
    more += ["## Unpredictable arrivals", "", _prose("arrivals"), "", *unpredictable_table(), ""]
    more += ["## Trials of effects", "", _prose("trials"), "", *trials_tables(trials), ""]
    variants = json.loads((HERE / "left_out.json").read_text())
    more += ["## Trials of the fit", "", _prose("variants"), "", *variants_table(variants), ""]
    page += [_prose("tail"), ""]
    more += [_prose("mechanisms"), ""]
    write_text(ROOT / "docs" / "fidelity.md", "\n".join(page), force=True)
    write_text(HERE / "details.md", "\n".join(more), force=True)
    write_readme(found)


if __name__ == "__main__":
    main()
