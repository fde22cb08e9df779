"""`packer workload`: make and describe workloads."""

from __future__ import annotations

from typing import Any

import click

import packer
from packer.cli.declare import bundle, command, option, pairs, typed, values
from packer.cli.options import FleetFile, Output, Writing, common, numbers
from packer.cli.output import Table
from packer.cli.plan_table import assumed_lengths
from packer.errors import IncompatibleError
from packer.operate.summary import sessions_of, summary_of
from packer.words import counted, number


@command
def describe(file: FleetFile, out: Output) -> None:
    """What a workload holds: adapters by rank, rates, token lengths, offered load.

    \b
    Example:
      packer workload describe examples/workloads/azure-conv-2023.csv
    """
    fleet = file.fleet()
    found = summary_of(fleet)
    out.result(found, lambda: _lines(fleet, found))


def headline(fleet: packer.Workload) -> str:
    """The workload in one line; rates and loads are means over the cycle of piecewise arrivals."""
    rate, load = (fleet.arrivals.mean_factor * each for each in (fleet.given_rates.sum(), fleet.offered_tok_s))
    return f"{counted(len(fleet), 'adapter')}, {rate:,.3g} req/s, offered load {load:,.0f} tok/s"


def _lines(fleet: packer.Workload, found: dict[str, Any]) -> list[Table | str]:
    cells = [[r["rank"], r["adapters"], number(r["rate"], 3), number(r["offered_tok_s"], 1)] for r in found["ranks"]]
    columns = ["rank", "adapters", "req/s", "offered tok/s"]
    cycle = f"; rates and loads are means over its cycle of {fleet.arrivals.whole_s(1.0):g} s"
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
        *([f"Lengths {assumed_lengths(fleet)}."] if fleet.assumed_lengths else []),
        f"Arrivals: {found['arrivals_description']}{cycle * (fleet.arrivals.cycle_s > 0.0)}.",
    ]


def _prefixes(fleet: packer.Workload, found: dict[str, Any]) -> list[str]:
    """Lines on sessions and shared prefixes; empty if the workload has neither."""
    lines, (turns, shared) = [], sessions_of(fleet)
    if fleet.has_sessions:
        said = f"Sessions: a request is in one of {turns:.3g} turns on average; prompts of all turns have"
        lines.append(f"{said} {found['mean_prompt_tokens']:,.0f} tokens on average, those above are of first turns.")
    if fleet.shared_prefix_tokens.any():
        lines.append(f"Shared prefixes: {shared:,.0f} tokens on average, or the whole of a shorter prompt.")
    return lines


COUNT, SESSION = click.IntRange(min=0), ("turns", "think-s", "turn-tokens")


@bundle
class Made:
    """Properties of the generated workload.

    adapters: How many adapters.
    ranks: LoRA ranks; each comes equally often.
    rates: Request rates, req/s; each comes equally often; 0 is an idle adapter. [default: 0.1,0.05,0.025]
    total_rate: Instead of --rates: this many req/s in all, shared by a power law.
    exponent: Of the power law: the k-th adapter gets a share proportional to k^-EXPONENT.
    input_tokens: Mean input length, tokens.
    output_tokens: Mean output length, tokens.
    shared_prefix_tokens: Tokens that all prompts of an adapter begin with, as a system prompt.
    sessions: Sessions: turns (mean requests of one, each with all that was said before), think-s (mean time between an
        answer and the next turn), turn-tokens (mean tokens that the user adds). --turns 4 is the same; repeatable.
    output: Where to write the workload: .csv, .json, .yaml or .parquet.
    """

    adapters: int = option(type=click.IntRange(1, 1_000_000), required=True)
    ranks: tuple[int, ...] = option(type=numbers(int), default="8,16", metavar="R,R,…")
    rates: tuple[float, ...] | None = option(type=numbers(float), metavar="X,X,…")
    total_rate: float | None = option(type=float, metavar="X")
    exponent: float = option(type=click.FloatRange(0.0, 20.0), default=1.0)
    input_tokens: float | None = option(type=float, metavar="MEAN")
    output_tokens: float | None = option(type=float, metavar="MEAN")
    shared_prefix_tokens: int = option("--shared-prefix", type=COUNT, default=0, metavar="TOKENS")
    sessions: dict[str, float] = pairs("--session", names=dict.fromkeys(SESSION, float))
    seed: int = common("seed")
    output: str = common("output", required=True)


@command
def generate(made: Made, out: Writing) -> None:
    """Make up a workload. Lengths have the shape of ShareGPT's (gamma) unless their means are given.

    \b
    Example:
      packer workload generate --adapters 256 --rates 0.1,0.05,0.025 --ranks 8,16 -o fleet.csv
      packer workload generate --adapters 1000 --total-rate 50 --exponent 1.2 -o fleet.csv
    """
    from packer.io.workloads import write_workload
    from packer.traces.assign import PowerLaw, generate_workload
    from packer.workload import SHAREGPT_INPUT, SHAREGPT_OUTPUT

    if made.rates is not None and made.total_rate is not None:
        raise IncompatibleError("--rates and --total-rate exclude each other: give one of them.")
    if made.total_rate is None and any(typed(("exponent",))):
        raise IncompatibleError("--exponent is that of shares of --total-rate: give it, too.")
    out.check(made.output)
    given = values(made, "adapters", "output", "total_rate", "exponent")
    given["rates"] = made.rates or (0.1, 0.05, 0.025)
    if made.total_rate is not None:
        given["rates"] = PowerLaw(made.total_rate, made.exponent)
    for name, shape in (("input_tokens", SHAREGPT_INPUT), ("output_tokens", SHAREGPT_OUTPUT)):
        given[name] = shape if given[name] is None else shape.scaled(given[name])
    about = dict(given.pop("sessions"))
    turns = about.pop("turns", None)
    if turns is None and about:
        raise IncompatibleError("--think-s and --turn-tokens describe sessions: expected --turns with them.")
    sessions = None if turns is None else packer.Sessions(turns, **about)
    fleet = generate_workload(made.adapters, sessions=sessions, **given)
    write_workload(fleet, made.output, force=out.force)
    out.result(lambda: {**summary_of(fleet), "output": made.output}, list)
    out.note(f"{made.output}: {headline(fleet)}")
