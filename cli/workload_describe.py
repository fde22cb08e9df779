"""`packer workload describe`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

from packer.cli.options import json_option, quiet_option, workload_argument

if TYPE_CHECKING:
    from packer.workload import Workload


@click.command()
@workload_argument
@json_option
@quiet_option
def describe(workload_path: str, as_json: bool, quiet: bool) -> None:
    """What a workload asks for: adapters by rank, rates, token lengths, offered load.

    \b
    Example:
      packer workload describe examples/workloads/azure-conv-2023.csv
    """
    from packer.cli.output import number, print_json, show, table
    from packer.io.workloads import read_workload

    fleet = read_workload(workload_path)
    summary = summarise(fleet)
    if as_json:
        print_json(summary)
    if as_json or quiet:
        return
    ranks = table(
        f"Adapters of {fleet.name} by rank",
        ["rank", "adapters", "req/s", "offered tok/s"],
        [
            [row["rank"], row["adapters"], number(row["rate"], 3), number(row["offered_tok_s"])]
            for row in summary["ranks"]
        ],
    )
    show(headline(fleet), ranks, *_lines(summary))


def _lines(summary: dict[str, Any]) -> list[str]:
    rates, inputs, outputs = summary["adapter_rate"], summary["input_tokens"], summary["output_tokens"]
    return [
        f"Rate of an adapter: {rates['min']:.3g} to {rates['max']:.3g} req/s, median {rates['median']:.3g}; "
        f"the busiest 5 % get {summary['share_of_top_5_percent']:.0%} of the requests, "
        f"the busiest 20 % {summary['share_of_top_20_percent']:.0%}.",
        f"Tokens per request: {inputs['mean']:,.0f} in (cv {inputs['cv']:.2f}), {outputs['mean']:,.0f} out "
        f"(cv {outputs['cv']:.2f}), correlation {summary['length_correlation']:+.2f}.",
        f"Arrivals: {summary['arrivals_description']}.",
    ]


def headline(fleet: Workload) -> str:
    """The workload in one line."""
    adapters = f"{len(fleet):,} adapter{'s' if len(fleet) != 1 else ''}"
    return f"{adapters}, {fleet.rate:,.3g} req/s, offered load {fleet.offered_tok_s:,.0f} tok/s"


def summarise(fleet: Workload) -> dict[str, Any]:
    """Figures of a workload, JSON-able; means and spreads of lengths are over requests."""
    import numpy as np

    ranks = [
        {
            "rank": int(rank),
            "adapters": int((fleet.ranks == rank).sum()),
            "rate": float(fleet.rates[fleet.ranks == rank].sum()),
            "offered_tok_s": float(fleet.offered_tok_s_by_adapter[fleet.ranks == rank].sum()),
        }
        for rank in np.unique(fleet.ranks)
    ]
    busiest = np.sort(fleet.rates)[::-1]
    return {
        "name": fleet.name,
        "adapters": len(fleet),
        "rate": fleet.rate,
        "offered_tok_s": fleet.offered_tok_s,
        "ranks": ranks,
        "adapter_rate": {
            "min": float(busiest[-1]),
            "median": float(np.median(busiest)),
            "max": float(busiest[0]),
        },
        "share_of_top_5_percent": _top_share(busiest.tolist(), 0.05),
        "share_of_top_20_percent": _top_share(busiest.tolist(), 0.2),
        "input_tokens": _mixture(fleet, "input_tokens"),
        "output_tokens": _mixture(fleet, "output_tokens"),
        "length_correlation": fleet.length_correlation,
        "arrivals": fleet.arrivals.kind,
        "arrivals_description": fleet.arrivals.description,
    }


def _top_share(sorted_rates: list[float], part: float) -> float:
    k = math.ceil(part * len(sorted_rates))
    return sum(sorted_rates[:k]) / sum(sorted_rates)


def _mixture(fleet: Workload, key: str) -> dict[str, float]:
    """Mean and cv of the lengths of all requests together."""
    import numpy as np

    lengths = [getattr(adapter, key) or getattr(fleet, key) for adapter in fleet.adapters]
    share = fleet.rates / fleet.rate
    means = np.array([item.mean for item in lengths])
    seconds = means**2 * (1.0 + np.array([item.cv for item in lengths]) ** 2)
    mean = float(share @ means)
    variance = max(float(share @ seconds) - mean**2, 0.0)
    return {"mean": mean, "cv": math.sqrt(variance) / mean}
