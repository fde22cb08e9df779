"""The picture of a simulation: what one server did over time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from packer.io.frames import pl
from packer.report.figures import Figure, Line, Mark, Panel

if TYPE_CHECKING:
    from packer.twin.run import Run


def simulation_figure(run: Run, *, title: str) -> Figure:
    """Requests, KV cache, adapters and tokens of a server over time; the offered load is marked."""
    timeline = run.timeline
    minutes = (timeline["time_s"] / 60).to_list()
    bin_s = timeline["time_s"][0]
    width_s = (run.duration_s - timeline["time_s"] + bin_s).clip(
        upper_bound=bin_s
    )  # the last bin may be short
    tokens = (timeline["prefill_tokens"] + timeline["decode_tokens"]) / width_s
    offered = Mark(run.offered_tok_s, "offered", axis="y")

    def panel(heading: str, unit: str, *marks: Mark, **columns: pl.Series) -> Panel:
        lines = [Line(minutes, column.to_list(), label) for label, column in columns.items()]
        return Panel(lines, title=heading, x_label="minutes", y_label=unit, marks=marks)

    requests = {"running": timeline["running"], "waiting": timeline["waiting"]}
    panels = [
        panel("Requests", "requests", **requests),
        panel("KV cache", "%", **{"in use": 100 * timeline["kv_usage"]}),
        panel("Adapters in the batch", "adapters", **{"in the batch": timeline["active_adapters"]}),
        panel("Tokens processed (prompts and outputs)", "tok/s", offered, processed=tokens),
    ]
    return Figure(panels, title=title)


def cluster_figure(run: Run, *, title: str) -> Figure:
    """A cluster over time: all of it, and how far its servers are apart."""
    timeline, servers = run.timeline, run.server_timeline
    minutes = (timeline["time_s"] / 60).to_list()
    outstanding = servers.with_columns((pl.col("running") + pl.col("waiting")).alias("requests"))

    def spread(heading: str, unit: str, column: str, factor: float = 1.0) -> Panel:
        """The least, the median and the most over the servers."""
        group = outstanding.group_by("time_s", maintain_order=True).agg(
            most=pl.col(column).max(), median=pl.col(column).median(), least=pl.col(column).min()
        )
        lines = [
            Line(minutes, (factor * group[name]).to_list(), name) for name in ("most", "median", "least")
        ]
        return Panel(lines, title=heading, x_label="minutes", y_label=unit)

    requests = [Line(minutes, timeline[name].to_list(), name) for name in ("running", "waiting")]
    panels = [
        Panel(requests, title="Requests of all servers", x_label="minutes", y_label="requests"),
        spread("Requests on a server", "requests", "requests"),
        spread("Busy time of a server", "%", "busy_share", 100.0),
        spread("Memory of a server in use", "%", "kv_usage", 100.0),
    ]
    return Figure(panels, title=title)
