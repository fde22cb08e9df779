"""`packer sweep`: how far one server goes until it breaks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

import packer
from packer.cli.declare import bundle, command, option
from packer.cli.memory import COUNTS
from packer.cli.options import FleetFile, Writing, common, numbers
from packer.cli.output import Table, note, write_frame
from packer.cli.settings import OneProfile, label_of
from packer.cli.traffic import refuse_unused
from packer.io.frames import pl
from packer.words import number

if TYPE_CHECKING:
    from packer.twin.sweep import Sweep

CURVE_POINTS = 12
MAX_LORAS = (8, 16, 32, 64, 96, 128, 160, 192, 256, 320, 384)


@bundle
class Axes:
    """The grid, or the search that takes its place, and what is written.

    adapters: Numbers of adapters; beyond the workload's own, its mix is drawn again. [default: 12 up to all]
    rate_factors: Multiply every request rate by each of these.
    max_loras: Adapter slots (vLLM's --max-loras). [default: 8 … 384, up to the largest number of adapters]
    duration_s: Simulated time. [default: 3600; whole cycles of piecewise rates; a replayed trace's own time]
    jobs: Threads. [default: all cores]
    tuning: Largest training throughput beside the requests within --slo, by this policy with its best parameter;
        repeatable.
    """

    adapters: tuple[int, ...] | None = option(type=COUNTS, metavar="LIST")
    rate_factors: tuple[float, ...] = option(type=numbers(float, distinct=True), default="1", metavar="LIST")
    max_loras: tuple[int, ...] | None = option(type=COUNTS, metavar="LIST")
    max_lora_rank: int | None = common("max-lora-rank")
    slo: tuple[str, ...] = common("slo")
    duration_s: float | None = common("duration")
    seed: int = common("seed")
    jobs: int | None = option(type=click.IntRange(min=1, max=1024), metavar="N")
    tuning: tuple[str, ...] = common("tuning", multiple=True)
    output: str | None = common("output", help="Write the rows here: .csv or .parquet.")
    plot: str | None = common("plot", help="Draw the curves (.html, .png or .svg).")


@command
def sweep(file: FleetFile, kind: OneProfile, axes: Axes, out: Writing) -> None:
    """How far one server goes until it breaks: throughput, TTFT and ITL over a grid.

    LIST is numbers separated by commas, or START:STOP:STEP; of counts also LOW..HIGH, with steps that grow.

    \b
    Example:
      packer sweep fleet.csv --adapters 16:256:16 --max-loras 16,64 -o sweep.csv --plot sweep.html
      packer sweep fleet.csv --max-loras 32 --rate-factors 0.5,1,2 --tuning llmstation --tuning chunked
    """
    from packer.twin.engine_rules import outage
    from packer.twin.sweep import Grid, Sweep, max_packs

    out.check(axes.output, what="table")
    out.check(axes.plot, what="picture")
    profile, workload = kind.profile(out), file.fleet().held_to(axes.slo)
    if axes.tuning:
        _tune(workload, profile, axes, out)
        return
    last = range(1, CURVE_POINTS + 1)
    counts = axes.adapters or tuple(sorted({max(1, len(workload) * k // CURVE_POINTS) for k in last}))
    slots = axes.max_loras or tuple(n for n in MAX_LORAS if n <= max(counts)) or MAX_LORAS[:1]
    grid = Grid(counts, axes.rate_factors, slots)
    plan = Sweep(workload, profile, grid, axes.max_lora_rank, axes.duration_s, axes.seed)
    frame = _simulate(plan, axes.output, axes.jobs or -1, out)
    packs, within = max_packs(frame), max_packs(frame, within_goal=True)
    if axes.plot is not None:
        _draw(plan, frame, packs, axes.plot)
    head = {"workload": workload.name, "profile": profile.name, "calibrated": profile.calibrated}
    head |= {"slo": workload.slo.limits.to_dict(), "seed": axes.seed}
    frames = {"rows": frame, "max_pack": packs, "max_pack_within_goal": within}
    title = f"{workload.name} on one {label_of(profile)}: Max_pack of each curve"
    ends = outage(profile.engine, min(slots), max(counts) if workload.n_loras else 0)
    out.result(
        lambda: {**head, **{name: each.to_dicts() for name, each in frames.items()}},
        lambda: [
            _table(frame, packs, within, title),
            f"Within the goal: {workload.slo}.",
            *([f"Outage: {ends}."] if ends else []),
        ],
    )


def _tune(workload: packer.Workload, profile: packer.Profile, axes: Axes, out: Writing) -> None:
    """Compare policies: each with its best parameter and the training throughput with that parameter."""
    from packer.twin.tuning.search import tuning_rows

    refuse_unused("--tuning", ("adapters", "plot"))
    slots = axes.max_loras or (min(len(workload), MAX_LORAS[2]),)
    with out.progress() as progress:
        rows = tuning_rows(
            workload, profile, axes.tuning, rate_factors=axes.rate_factors, max_loras=slots,
            max_lora_rank=axes.max_lora_rank, duration_s=axes.duration_s, seed=axes.seed,
            workers=axes.jobs or 1, progress=progress,
        )  # fmt: skip
    plain = [{name: value for name, value in row.items() if name != "tried"} for row in rows]
    write_frame(pl.DataFrame(plain, infer_schema_length=None) if axes.output else None, axes.output)
    data = {"workload": workload.name, "profile": profile.name, "slo": workload.slo.limits.to_dict(), "rows": rows}
    title = f"{workload.name}: most training beside the requests"
    out.result(data, lambda: [_tuned_table(plain, title)])


def _tuned_table(rows: list[dict[str, Any]], title: str) -> Table:
    columns = (("rate", 2), ("samples_s", 2), ("tuning_tok_s", 0), ("p99_ttft_ms", 0), ("p99_tpot_ms", 1))
    heads = ["policy", "with", "max_loras", "req/s", "samples/s", "tok/s", "p99 TTFT ms", "p99 TPOT ms"]
    cells = []
    for row in rows:
        best = "limits not kept" if row["best"] is None else row["best"].partition(":")[2]
        shown = (number(row.get(name), digits) for name, digits in columns)
        cells.append([row["policy"], best, row["max_loras"], *shown])
    return Table(title, heads, cells, left=(0, 1))


def _simulate(plan: Sweep, output: str | None, jobs: int, out: Writing) -> pl.DataFrame:
    """Simulate the grid and write its rows. Ctrl-C writes the finished rows and raises `KeyboardInterrupt`."""
    from packer.twin.sweep import sweep_frame

    rows: list[dict[str, Any]] = []
    try:
        with out.progress() as progress:
            rows.extend(plan.rows(jobs=jobs, progress=progress))
    except KeyboardInterrupt:
        if output is not None and rows:
            write_frame(sweep_frame(rows), output)
            note(f"interrupted: {len(rows)} of {len(plan.grid)} points are in {output}.")
        raise
    frame = sweep_frame(rows)
    write_frame(frame, output)
    return frame


def _draw(plan: Sweep, frame: pl.DataFrame, packs: pl.DataFrame, path: str) -> None:
    from packer.report.figures import write_figure
    from packer.report.pictures import sweep_figure
    from packer.twin.sweep import x_axis

    title = f"{plan.workload.name} on one {plan.profile.label}"
    write_figure(sweep_figure(frame, packs, x_axis(frame), title=title), path)


_SHOWN = {"offered_tok_s": 0, "total_token_throughput": 0, "mean_ttft_ms": 1, "mean_itl_ms": 1}


def _table(frame: pl.DataFrame, packs: pl.DataFrame, within: pl.DataFrame, title: str) -> Table:
    from packer.twin.sweep import AXES, x_axis

    axis = x_axis(frame)
    others = [name for name in AXES if name != axis]
    found = ({tuple(row[name] for name in others): row for row in each.to_dicts()} for each in (packs, within))
    best, kept = found
    cells = []
    for key, part in frame.group_by(others, maintain_order=True):
        names = [f"{value:g}" for value in key]
        row = best.get(key)
        if row is None:
            why = "memory error" if part["memory_error"].all() else "starves everywhere"
            cells.append([*names, why, *[""] * 6])
            continue
        last = row[axis] == part[axis].max()
        inside = f"{kept[key][axis]:g}" if key in kept else "none"
        beyond = part.filter(pl.col(axis) > kept[key][axis]) if key in kept else part
        limited = beyond["limited_by"].drop_nulls().to_list()[:1] or [""]
        shown = [number(row[name], digits) for name, digits in _SHOWN.items()]
        most = f"{row[axis]:g}" + (" (end of the grid)" if last else "")
        cells.append([*names, most, inside, *limited, *shown])
    columns = [*others, f"Max_pack ({axis})", "within the goal", "limited by"]
    columns += ["offered tok/s", "tok/s", "TTFT ms", "ITL ms"]
    return Table(title, columns, cells, left=())
