"""`packer workload generate`."""

from __future__ import annotations

import click

from packer.cli.options import NumberList, force_option, json_option, output_option, quiet_option, seed_option


@click.command()
@click.option(
    "--adapters", "n_adapters", type=click.IntRange(1, 1_000_000), required=True, help="How many adapters."
)
@click.option(
    "--ranks",
    type=NumberList(int),
    default="8,16",
    show_default=True,
    metavar="R,R,…",
    help="LoRA ranks; each comes equally often.",
)
@click.option(
    "--rates",
    type=NumberList(float),
    default=None,
    metavar="X,X,…",
    help="Request rates, req/s; each comes equally often.  [default: 0.1,0.05,0.025]",
)
@click.option(
    "--total-rate",
    type=float,
    default=None,
    metavar="X",
    help="Instead of --rates: this many req/s in all, shared by a power law.",
)
@click.option(
    "--exponent",
    type=click.FloatRange(0.0, 20.0),
    default=1.0,
    show_default=True,
    help="Of the power law: the k-th adapter gets a share proportional to k^-EXPONENT.",
)
@click.option("--input-tokens", type=float, default=None, metavar="MEAN", help="Mean input length, tokens.")
@click.option("--output-tokens", type=float, default=None, metavar="MEAN", help="Mean output length, tokens.")
@seed_option
@output_option("Where to write the workload: .csv, .json, .yaml or .parquet.", required=True)
@force_option
@json_option
@quiet_option
def generate(
    n_adapters: int,
    ranks: tuple[int, ...],
    rates: tuple[float, ...] | None,
    total_rate: float | None,
    exponent: float,
    input_tokens: float | None,
    output_tokens: float | None,
    seed: int,
    output: str,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Make up a workload. Lengths have the shape of ShareGPT's (gamma) unless their means are given.

    \b
    Example:
      packer workload generate --adapters 256 --rates 0.1,0.05,0.025 --ranks 8,16 -o fleet.csv
      packer workload generate --adapters 1000 --total-rate 50 --exponent 1.2 -o fleet.csv
    """
    from packer.cli.output import check_output, note, print_json
    from packer.cli.workload_describe import headline, summarise
    from packer.errors import IncompatibleError
    from packer.io.workload_schema import checked_mean
    from packer.io.workloads import write_workload
    from packer.traces.synthetic import generate_workload
    from packer.workload import SHAREGPT_INPUT, SHAREGPT_OUTPUT

    if rates is not None and total_rate is not None:
        raise IncompatibleError("--rates and --total-rate exclude each other: give one of them.")
    check_output(output, force=force)
    fleet = generate_workload(
        n_adapters,
        ranks=ranks,
        rates=() if total_rate is not None else rates or (0.1, 0.05, 0.025),
        total_rate=total_rate,
        exponent=exponent,
        input_tokens=SHAREGPT_INPUT
        if input_tokens is None
        else SHAREGPT_INPUT.scaled(checked_mean(input_tokens)),
        output_tokens=SHAREGPT_OUTPUT
        if output_tokens is None
        else SHAREGPT_OUTPUT.scaled(checked_mean(output_tokens)),
        seed=seed,
    )
    write_workload(fleet, output, force=force)
    if as_json:
        print_json({**summarise(fleet), "output": output})
    else:
        note(f"{output}: {headline(fleet)}", quiet=quiet)
