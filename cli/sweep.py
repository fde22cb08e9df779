"""`packer sweep`: how far one server goes until it breaks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from packer.cli import options
from packer.cli.output import (
    check_output,
    note,
    note_estimated,
    number,
    print_json,
    progress_bar,
    show,
    table,
)

if TYPE_CHECKING:
    import polars as pl

    from packer.twin.sweep import Sweep

CURVE_POINTS = 12
LONGEST_RANGE = 10_000
MAX_LORAS = (8, 16, 32, 64, 96, 128, 160, 192, 256, 320, 384)
SUFFIXES = (".csv", ".parquet")


def numbers(*, whole: bool) -> Callable[[click.Context, click.Parameter, Any], tuple[float, ...] | None]:
    """Option callback: numbers separated by commas, and ranges START:STOP:STEP with both ends; sorted."""

    def convert(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[float, ...] | None:
        if value is None:
            return None
        try:
            return tuple(sorted({number for part in value.split(",") for number in _span(part, whole=whole)}))
        except (ValueError, OverflowError):
            kind = "whole numbers" if whole else "numbers"
            message = f"Expected {kind} such as 8,16,32 or START:STOP:STEP, got {value[:80]!r}."
            raise click.BadParameter(message, ctx, param) from None

    return convert


def _span(text: str, *, whole: bool) -> list[float]:
    bounds = [int(piece) if whole else float(piece) for piece in text.split(":")]
    if len(bounds) == 1:
        return [bounds[0]]
    start, stop, step = bounds
    count = int((stop - start) / step + 1e-9) + 1 if step > 0 and stop >= start else 0
    if not 0 < count <= LONGEST_RANGE:
        raise ValueError
    return [start + k * step if whole else round(start + k * step, 12) for k in range(count)]


@click.command()
@options.workload_argument
@options.profile_option
@click.option(
    "--adapters",
    callback=numbers(whole=True),
    metavar="LIST",
    help="Numbers of adapters; beyond the workload's own, its mix is drawn again.  [default: 12 up to all]",
)
@click.option(
    "--rate-factors",
    callback=numbers(whole=False),
    default="1",
    show_default=True,
    metavar="LIST",
    help="Multiply every request rate by each of these.",
)
@click.option(
    "--max-loras",
    callback=numbers(whole=True),
    metavar="LIST",
    help="Adapter slots (vLLM's --max-loras).  [default: 8 … 384, up to the largest number of adapters]",
)
@options.max_lora_rank_option
@options.duration_option
@options.seed_option
@click.option(
    "--jobs", type=click.IntRange(min=1, max=1024), metavar="N", help="Threads.  [default: all cores]"
)
@options.output_option("Write the rows here: .csv or .parquet.")
@click.option("--plot", metavar="FILE", help="Draw the curves here: .html, .png or .svg.")
@click.option(
    "--resume", is_flag=True, help="Keep the rows that --output already holds, add what is missing."
)
@options.json_option
@options.quiet_option
@options.force_option
def sweep(
    workload_path: str,
    profile_name: str,
    adapters: tuple[int, ...] | None,
    rate_factors: tuple[float, ...],
    max_loras: tuple[int, ...] | None,
    max_lora_rank: int | None,
    duration_s: float,
    seed: int,
    jobs: int | None,
    output: str | None,
    plot: str | None,
    resume: bool,
    as_json: bool,
    quiet: bool,
    force: bool,
) -> None:
    """How far one server goes until it breaks: throughput, TTFT and ITL over a grid.

    LIST is numbers separated by commas, or START:STOP:STEP.

    \b
    Example:
      packer sweep fleet.csv --adapters 16:256:16 --max-loras 16,64 -o sweep.csv --plot sweep.html
    """
    from packer.io.profiles import load_profile
    from packer.io.workloads import read_workload
    from packer.twin.sweep import Grid, Sweep, max_packs

    _check_paths(output, plot, resume=resume, force=force)
    profile = load_profile(profile_name)
    note_estimated(profile, quiet=quiet)
    workload = read_workload(workload_path)
    counts = adapters or tuple(sorted({max(1, len(workload) * k // CURVE_POINTS) for k in range(1, 13)}))
    slots = max_loras or tuple(n for n in MAX_LORAS if n <= max(counts)) or MAX_LORAS[:1]
    plan = Sweep(workload, profile, Grid(counts, rate_factors, slots), max_lora_rank, duration_s, seed)
    frame = _simulate(plan, output, resume=resume, jobs=jobs or -1, quiet=quiet)
    packs = max_packs(frame)
    if plot is not None:
        _draw(plan, frame, packs, plot)
    if as_json:
        head = {"workload": workload.name, "profile": profile.name, "calibrated": profile.calibrated}
        print_json({**head, "seed": seed, "rows": frame.to_dicts(), "max_pack": packs.to_dicts()})
    elif not quiet:
        _print(frame, packs, f"{workload.name} on one {profile.label}: Max_pack of each curve")


def _check_paths(output: str | None, plot: str | None, *, resume: bool, force: bool) -> None:
    """Refuse before long work what could not be written after it."""
    from packer.errors import IncompatibleError, ValidationError, shown
    from packer.report.figures import check_suffix

    if plot is not None:
        check_suffix(plot)
        check_output(plot, force=force or resume)
    if output is None:
        if resume:
            raise IncompatibleError("--resume needs --output: the file whose rows are kept.")
        return
    if Path(output).suffix.lower() not in SUFFIXES:
        raise ValidationError(f"Expected --output to end in {', '.join(SUFFIXES)}, got {shown(output)}.")
    check_output(output, force=force or resume)


def _simulate(plan: Sweep, output: str | None, *, resume: bool, jobs: int, quiet: bool) -> pl.DataFrame:
    """All rows; what is there when somebody interrupts is written, so that --resume can go on."""
    from packer.io.parquet import write_frame
    from packer.twin.sweep import sweep_frame

    rows = _old_rows(plan, output) if resume and output is not None and Path(output).exists() else []
    done = {(row["adapters"], row["rate_factor"], row["max_loras"]) for row in rows}
    try:
        with progress_bar(quiet=quiet) as progress:
            for row in plan.rows(done=done, jobs=jobs, progress=progress):
                rows.append(row)
    except KeyboardInterrupt:
        if output is not None and rows:
            write_frame(sweep_frame(rows), output)
            note(f"{len(rows)} of {len(plan.grid)} points are in {output}; --resume goes on from there.")
        raise
    frame = sweep_frame(rows)
    if output is not None:
        write_frame(frame, output)
    return frame


def _old_rows(plan: Sweep, path: str) -> list[dict[str, Any]]:
    """Rows of an earlier run of the same sweep."""
    import polars as pl

    from packer.errors import FileFormatError, IncompatibleError
    from packer.io.files import read_bytes
    from packer.io.parquet import read_parquet
    from packer.twin.sweep import sweep_frame

    schema = sweep_frame([]).schema
    data = read_bytes(path)
    try:
        csv = Path(path).suffix.lower() == ".csv"
        frame = pl.read_csv(data, schema=schema) if csv else read_parquet(data, path)
    except pl.exceptions.PolarsError as error:
        reason = str(error).partition("\n")[0]
        raise FileFormatError(f"expected the rows of a sweep: {reason}", path=path) from None
    if frame.schema != schema:
        raise FileFormatError(f"expected the columns {', '.join(schema)} of a sweep.", path=path)
    if frame["sweep"].ne_missing(plan.fingerprint).any():
        raise IncompatibleError(
            f"{path} holds rows of another sweep: workload, profile, slot rank, duration or seed differ. "
            "Choose another file, or drop --resume and overwrite it with --force."
        )
    return frame.unique(["adapters", "rate_factor", "max_loras"], maintain_order=True).to_dicts()


def _draw(plan: Sweep, frame: pl.DataFrame, packs: pl.DataFrame, path: str) -> None:
    from packer.report.figures import write_figure
    from packer.report.sweep import sweep_figure
    from packer.twin.sweep import x_axis

    title = f"{plan.workload.name} on one {plan.profile.label}"
    write_figure(sweep_figure(frame, packs, x_axis(frame), title=title), path)


def _print(frame: pl.DataFrame, packs: pl.DataFrame, title: str) -> None:
    from packer.twin.sweep import AXES, x_axis

    axis = x_axis(frame)
    others = [name for name in AXES if name != axis]
    best = {tuple(row[name] for name in others): row for row in packs.iter_rows(named=True)}
    cells = []
    for key, part in frame.group_by(others, maintain_order=True):
        names = [f"{value:g}" for value in key]
        row = best.get(key)
        if row is None:
            why = "memory error" if part["memory_error"].all() else "starves everywhere"
            cells.append([*names, why, "", "", "", ""])
            continue
        last = row[axis] == part[axis].max()
        cells.append(
            [
                *names,
                f"{row[axis]:g}" + (" (end of the grid)" if last else ""),
                number(row["offered_tok_s"], 0),
                number(row["total_token_throughput"], 0),
                number(row["mean_ttft_ms"]),
                number(row["mean_itl_ms"]),
            ]
        )
    columns = [*others, f"Max_pack ({axis})", "offered tok/s", "tok/s", "TTFT ms", "ITL ms"]
    show(table(title, columns, cells, left=()))
