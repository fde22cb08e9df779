"""The picture of a simulation: what one server did over time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from packer.report.figures import Figure, Line, Mark, Panel

if TYPE_CHECKING:
    import polars as pl


def simulation_figure(
    timeline: pl.DataFrame, *, duration_s: float, offered_tok_s: float, title: str
) -> Figure:
    """Requests, KV cache, adapters and tokens over time.

    Parameters
    ----------
    timeline
        As `Simulation.timeline` has it; at least one row.
    duration_s
        Simulated time.
    offered_tok_s
        Offered load, marked in the panel of the tokens.
    title
        What was simulated.
    """
    minutes = (timeline["time_s"] / 60).to_list()
    bin_s = timeline["time_s"][0]
    width_s = (duration_s - timeline["time_s"] + bin_s).clip(upper_bound=bin_s)  # the last bin may be short
    tokens = (timeline["prefill_tokens"] + timeline["decode_tokens"]) / width_s
    return Figure(
        [
            Panel(
                [
                    Line(minutes, timeline["running"].to_list(), "running"),
                    Line(minutes, timeline["waiting"].to_list(), "waiting"),
                ],
                title="Requests",
                x_label="minutes",
                y_label="requests",
            ),
            Panel(
                [
                    Line(minutes, (100 * timeline["kv_usage"]).to_list(), "in use"),
                ],
                title="KV cache",
                x_label="minutes",
                y_label="%",
            ),
            Panel(
                [Line(minutes, timeline["active_adapters"].to_list(), "in the batch")],
                title="Adapters in the batch",
                x_label="minutes",
                y_label="adapters",
            ),
            Panel(
                [Line(minutes, tokens.to_list(), "processed")],
                title="Tokens processed (prompts and outputs)",
                x_label="minutes",
                y_label="tok/s",
                marks=(Mark(offered_tok_s, "offered", axis="y"),),
            ),
        ],
        title=title,
    )
