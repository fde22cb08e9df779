"""`packer workload generate`."""

from __future__ import annotations

import click

from packer.cli.declare import bundle, command, option, pairs, values
from packer.cli.options import Writing, common, numbers


@bundle
class Made:
    """What is made up.

    adapters: How many adapters.
    ranks: LoRA ranks; each comes equally often.
    rates: Request rates, req/s; each comes equally often. [default: 0.1,0.05,0.025]
    total_rate: Instead of --rates: this many req/s in all, shared by a power law.
    exponent: Of the power law: the k-th adapter gets a share proportional to k^-EXPONENT.
    input_tokens: Mean input length, tokens.
    output_tokens: Mean output length, tokens.
    shared_prefix_tokens: Tokens that all prompts of an adapter begin with, as a system prompt.
    sessions: Sessions: turns (mean requests of one; each begins with all that was said before), think-s (mean time from
        an answer to the next turn, s), turn-tokens (mean tokens that the user adds in a later turn; as in the first,
        less the prefix); --turns 4 is the same; repeatable.
    output: Where to write the workload: .csv, .json, .yaml or .parquet.
    """

    adapters: int = option(type=click.IntRange(1, 1_000_000), required=True)
    ranks: tuple[int, ...] = option(type=numbers(int), default="8,16", metavar="R,R,…")
    rates: tuple[float, ...] | None = option(type=numbers(float), metavar="X,X,…")
    total_rate: float | None = option(type=float, metavar="X")
    exponent: float = option(type=click.FloatRange(0.0, 20.0), default=1.0)
    input_tokens: float | None = option(type=float, metavar="MEAN")
    output_tokens: float | None = option(type=float, metavar="MEAN")
    shared_prefix_tokens: int = option(
        "--shared-prefix", type=click.IntRange(min=0), default=0, metavar="TOKENS"
    )
    sessions: dict[str, float] = pairs(
        "--session", names=dict.fromkeys(("turns", "think-s", "turn-tokens"), float)
    )
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
    from packer.cli.workload.describe import headline
    from packer.errors import IncompatibleError
    from packer.io.workload_schema import checked_mean
    from packer.io.workloads import write_workload
    from packer.operate.summary import summary_of
    from packer.sessions import Sessions
    from packer.traces.synthetic import PowerLaw, generate_workload
    from packer.workload import SHAREGPT_INPUT, SHAREGPT_OUTPUT

    if made.rates is not None and made.total_rate is not None:
        raise IncompatibleError("--rates and --total-rate exclude each other: give one of them.")
    out.check(made.output)
    given = values(made, "adapters", "output", "total_rate", "exponent")
    given["rates"] = made.rates or (0.1, 0.05, 0.025)
    if made.total_rate is not None:
        given["rates"] = PowerLaw(made.total_rate, made.exponent)
    for name, shape in (("input_tokens", SHAREGPT_INPUT), ("output_tokens", SHAREGPT_OUTPUT)):
        given[name] = shape if given[name] is None else shape.scaled(checked_mean(given[name]))
    about = dict(given.pop("sessions"))
    turns = about.pop("turns", None)
    if turns is None and about:
        raise IncompatibleError("--think-s and --turn-tokens describe sessions: expected --turns with them.")
    sessions = None if turns is None else Sessions(turns, **about)
    fleet = generate_workload(made.adapters, sessions=sessions, **given)
    write_workload(fleet, made.output, force=out.force)
    out.result(lambda: {**summary_of(fleet), "output": made.output}, list)
    out.note(f"{made.output}: {headline(fleet)}")
