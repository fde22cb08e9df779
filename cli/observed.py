"""What the commands that measure a fleet from observed traffic share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

from packer.cli import options
from packer.errors import FileFormatError, ValidationError

if TYPE_CHECKING:
    from packer.traces.pattern import RateTable
    from packer.traces.prometheus import Metrics
    from packer.workload import Workload

DEFAULT_RANK = 16


def observed_options(command: options.F) -> options.F:
    """Options of the commands that write a workload from observed traffic."""
    for option in reversed(
        (
            click.option(
                "--ranks",
                "ranks_path",
                default=None,
                metavar="FILE.csv",
                help="Table of ranks, with the columns adapter,rank: traffic doesn't tell them.",
            ),
            click.option(
                "--rank",
                type=click.IntRange(1, 512),
                default=DEFAULT_RANK,
                show_default=True,
                help="Rank of adapters that are not in the table.",
            ),
            click.option(
                "--window",
                "window_s",
                type=click.FloatRange(min=1.0, max=1e8),
                default=3600.0,
                show_default=True,
                metavar="SECONDS",
                help="Rates are counted in windows of this length.",
            ),
            click.option(
                "--at",
                default="mean",
                show_default=True,
                metavar="mean|peak|each-peak|pNN",
                help="Rates of the workload: of the mean, of the busiest window, of every adapter's own "
                "busiest window, or of the window at a percentile of the load.",
            ),
            click.option(
                "--percentiles",
                type=options.NumberList(float),
                default=(50.0, 95.0),
                show_default="50,95",
                metavar="P,P,…",
                help="Percentiles among the loads of --loads.",
            ),
            click.option(
                "--by-time-of-day",
                is_flag=True,
                help="Average the days first: windows at the same time of day (UTC) become one.",
            ),
            click.option(
                "--loads",
                "loads_path",
                default=None,
                metavar="FILE.csv",
                help="Also write the rates at each load, for --objective headroom:rates=FILE.csv.",
            ),
            options.output_option(
                "Where to write the workload: .csv, .json, .yaml or .parquet.", required=True
            ),
            options.force_option,
            options.json_option,
            options.quiet_option,
        )
    ):
        command = option(command)
    return command


def read_ranks(path: str | None) -> dict[str, int]:
    """Adapter → rank from a CSV with the columns adapter,rank."""
    if path is None:
        return {}
    from packer.adapter import MAX_RANK
    from packer.io.files import read_text
    from packer.io.tables import check_columns, csv_rows

    names, rows = csv_rows(read_text(path), path)
    check_columns(names, ("adapter", "rank"), (), path)
    table: dict[str, int] = {}
    for row in rows:
        name = row.text("adapter")
        if name in table:
            raise FileFormatError("expected each adapter once.", path=path, row=row.number, column="adapter")
        table[name] = row.integer("rank", low=1, high=MAX_RANK)
    return table


def chosen_rates(table: RateTable, at: str, percentiles: Sequence[float]) -> Mapping[str, list[float]]:
    """The loads of a table with the one called `at` first."""
    wanted = list(percentiles)
    if at.startswith("p") and at != "peak":
        try:
            wanted.append(float(at[1:]))
        except ValueError:
            raise ValidationError(
                f"Expected --at to be mean, peak, each-peak or p0 … p100, got {at!r}."
            ) from None
        at = f"p{float(at[1:]):g}"
    loads = table.loads(wanted)
    if at not in loads:
        raise ValidationError(f"Expected --at to be mean, peak, each-peak or p0 … p100, got {at!r}.")
    ordered = {at: loads[at], **loads}
    return {name: vector.tolist() for name, vector in ordered.items()}


def metrics_workload(
    metrics: Metrics, rates: Sequence[float], ranks: Mapping[str, int], rank: int
) -> Workload:
    """A fleet with measured rates and mean lengths; the spread of lengths is ShareGPT's."""
    from packer.adapter import Adapter
    from packer.workload import SHAREGPT_INPUT, SHAREGPT_OUTPUT, Workload

    return Workload(
        [
            Adapter(
                name,
                ranks.get(name, rank),
                rate,
                SHAREGPT_INPUT.scaled(inputs),
                SHAREGPT_OUTPUT.scaled(outputs),
            )
            for name, rate, inputs, outputs in zip(
                metrics.table.names,
                rates,
                metrics.mean_input.tolist(),
                metrics.mean_output.tolist(),
                strict=True,
            )
            if rate > 0
        ],
        name="metrics",
    )


def finish(
    fleet: Workload,
    table: RateTable,
    loads: Mapping[str, Sequence[float]],
    output: str,
    loads_path: str | None,
    *,
    source: str,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Write the workload and the loads, and say what was seen."""
    import numpy as np

    from packer.cli.output import note, print_json, show
    from packer.cli.output import table as draw
    from packer.cli.workload_describe import headline
    from packer.io.workloads import write_workload
    from packer.traces.measure import rounded
    from packer.traces.pattern import write_loads

    write_workload(rounded(fleet), output, force=force, comments=[source])
    vectors = {name: np.array(vector) for name, vector in loads.items()}
    if loads_path is not None:
        write_loads(loads_path, table.names, vectors, force=force)
        note(f"wrote {loads_path}", quiet=quiet)
    totals = {name: (float(vector.sum()), float(vector @ table.tokens)) for name, vector in vectors.items()}
    if as_json:
        seen = {name: {"requests_s": rate, "offered_tok_s": load} for name, (rate, load) in totals.items()}
        print_json({"output": output, "adapters": len(fleet), "windows": len(table.rates), "loads": seen})
    elif not quiet:
        rows = [(name, f"{rate:,.3f}", f"{load:,.0f}") for name, (rate, load) in totals.items()]
        title = f"Loads over {len(table.rates):,} windows of {table.window_s:g} s"
        show(draw(title, ("load", "requests/s", "tok/s"), rows))
    note(f"{output}: {headline(fleet)}", quiet=quiet)
