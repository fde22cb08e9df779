"""What the commands that write a workload from observed traffic share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from packer.cli.declare import bundle, pairs
from packer.cli.options import Writing, common
from packer.cli.output import Table

if TYPE_CHECKING:
    from packer.operate.observe import Observed


@bundle
class ObservedFiles:
    """What is written.

    tables: Also write rates, .csv: loads (at each load, for --objective headroom:rates=FILE.csv), day (in each window
        of the mean day, UTC, for packer schedule --rates FILE.csv); --day FILE.csv is the same; repeatable.
    output: Where to write the workload: .csv, .json, .yaml or .parquet.
    """

    tables: dict[str, str] = pairs("--table", names={"loads": str, "day": str}, metavar="NAME=FILE")
    output: str = common("output", required=True)

    def write(
        self, found: Observed, out: Writing, *, source: str, facts: Mapping[str, Any] | None = None
    ) -> None:
        """Write the workload and the loads, and say what was seen; `facts`: more of it, for machines."""
        from packer.cli.workload.describe import headline
        from packer.io.files import write_text
        from packer.io.workloads import write_workload
        from packer.traces.measure import rounded
        from packer.traces.pattern import loads_text

        fleet = found.fleet if found.fleet.arrivals.trace is not None else rounded(found.fleet)
        rates = found.table
        written = {"loads": found.loads, "day": rates.day() if "day" in self.tables else {}}
        write_workload(fleet, self.output, force=out.force, comments=[source])
        for each in (f"traffic of {found.span}; rates: {found.planned_for}", *found.notes):
            out.note(each)
        for name, path in self.tables.items():
            write_text(path, loads_text(rates.names, written[name]), force=out.force)
            out.note(f"wrote {path}")
        totals = {
            name: {"requests_s": float(vector.sum()), "offered_tok_s": float(vector @ rates.tokens)}
            for name, vector in found.loads.items()
        }
        counts = {"adapters": len(found.fleet), **(facts or {}), "windows": len(rates.rates)}
        rows = [
            (name, f"{row['requests_s']:,.3f}", f"{row['offered_tok_s']:,.0f}")
            for name, row in totals.items()
        ]
        title = f"Loads over {len(rates.rates):,} windows of {rates.window_s:g} s"
        out.result(
            {"output": self.output, **counts, "loads": totals},
            lambda: [Table(title, ("load", "requests/s", "tok/s"), rows)] if len(rates.rates) > 1 else [],
        )
        fleet = found.fleet
        out.note(f"{self.output}: {headline(fleet)}; arrivals {fleet.arrivals.description}")
