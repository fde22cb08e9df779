"""`packer workload describe`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from packer.cli.declare import command
from packer.cli.options import FleetFile, Output
from packer.cli.output import Table
from packer.cli.plan_table import assumed_lengths
from packer.words import counted, number

if TYPE_CHECKING:
    from packer.workload import Workload


@command
def describe(file: FleetFile, out: Output) -> None:
    """What a workload holds: adapters by rank, rates, token lengths, offered load.

    \b
    Example:
      packer workload describe examples/workloads/azure-conv-2023.csv
    """
    from packer.operate.summary import summary_of

    fleet = file.fleet()
    found = summary_of(fleet)
    out.result(found, lambda: _lines(fleet, found))


def headline(fleet: Workload) -> str:
    """The workload in one line."""
    return f"{counted(len(fleet), 'adapter')}, {fleet.rate:,.3g} req/s, offered load {fleet.offered_tok_s:,.0f} tok/s"


def _lines(fleet: Workload, found: dict[str, Any]) -> list[Table | str]:
    cells = [
        [row["rank"], row["adapters"], number(row["rate"], 3), number(row["offered_tok_s"], 1)]
        for row in found["ranks"]
    ]
    columns = ["rank", "adapters", "req/s", "offered tok/s"]
    rates, inputs, outputs = found["adapter_rate"], found["input_tokens"], found["output_tokens"]
    return [
        headline(fleet),
        Table(f"Adapters of {fleet.name} by rank", columns, cells),
        f"Rate of an adapter: {rates['min']:.3g} to {rates['max']:.3g} req/s, median {rates['median']:.3g}; "
        f"the busiest 5 % get {found['share_of_top_5_percent']:.0%} of the requests, "
        f"the busiest 20 % {found['share_of_top_20_percent']:.0%}.",
        f"Tokens per request: {inputs['mean']:,.0f} in (cv {inputs['cv']:.2f}), {outputs['mean']:,.0f} out "
        f"(cv {outputs['cv']:.2f}), correlation {found['length_correlation']:+.2f}.",
        *(_prefixes(fleet, found)),
        *([f"Lengths {assumed_lengths()}."] if fleet.assumed_lengths else []),
        f"Arrivals: {found['arrivals_description']}.",
    ]


def _prefixes(fleet: Workload, found: dict[str, Any]) -> list[str]:
    """How much requests begin alike; nothing where they do not."""
    import numpy as np

    lines = []
    if fleet.has_sessions:
        turns = np.average(
            [1.0 if own is None else own.turns for own in fleet.sessions_by_adapter], weights=fleet.rates
        )
        lines.append(
            f"Sessions: a request is in one of {turns:.3g} turns on average; prompts of all turns have "
            f"{found['mean_prompt_tokens']:,.0f} tokens on average, those above are of first turns."
        )
    if fleet.shared_prefix_tokens.any():
        shared = float(np.average(fleet.shared_prefix_tokens, weights=fleet.rates))
        lines.append(f"Shared prefixes: {shared:,.0f} tokens of a prompt on average.")
    return lines
