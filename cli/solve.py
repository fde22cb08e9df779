"""`packer solve`: a workload becomes a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from packer.cli import options
from packer.cli.interrupt import interruptible
from packer.cli.output import check_output, note, note_estimated, print_json, progress_bar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from packer.plan import Plan
    from packer.profile import Profile

DEFAULT_OUTPUT = "plan.json"


def plan_options(command: options.F) -> options.F:
    """Options of every command that makes a plan: confidence, margin, replicas, verification."""
    for option in reversed(
        (
            click.option(
                "--max-replicas",
                type=click.IntRange(min=1, max=10_000),
                default=1,
                show_default=True,
                metavar="N",
                help="Split an adapter that is too hot for one GPU over up to so many.",
            ),
            click.option(
                "--confidence",
                type=click.FloatRange(min=0.5, max=0.99),
                default=None,
                metavar="P",
                help="How sure the plan is to hold, given the profile's error; raises the rates that servers "
                "must stand.  [default: 0.95]",
            ),
            click.option(
                "--margin",
                type=click.FloatRange(min=0.0, max=10.0),
                default=None,
                metavar="X",
                help="That raise itself, instead of a confidence: 0.05 is 5 %; 0 for none.",
            ),
            click.option(
                "--verify/--no-verify",
                default=True,
                show_default=True,
                help="Ask the twin about the finished plan, with a fresh seed.",
            ),
        )
    ):
        command = option(command)
    return command


@click.command(context_settings={"show_default": False})
@options.workload_argument
@options.profiles_option
@options.objective_option
@options.solver_option
@options.predictor_option
@options.gpus_option
@plan_options
@click.option(
    "--price",
    "prices",
    multiple=True,
    metavar="PROFILE=PRICE",
    help="Price of a GPU per hour, for the objective cost; repeatable.  [default: the profile's]",
)
@options.time_limit_option
@options.seed_option
@options.output_option(f"Where to write the plan.  [default: {DEFAULT_OUTPUT}; with --json nowhere]")
@options.force_option
@options.json_option
@options.quiet_option
def solve(
    workload_path: str,
    profile_names: tuple[str, ...],
    objective: str,
    solver: str | None,
    predictor: str,
    gpus: int | None,
    max_replicas: int,
    confidence: float | None,
    margin: float | None,
    verify: bool,
    prices: tuple[str, ...],
    time_limit_s: float | None,
    seed: int,
    output: str | None,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Plan: how many GPUs, which adapter where, how to start each server.

    WORKLOAD is a CSV, JSON, YAML or Parquet file of adapters with rank and rate. Objectives take parameters
    as in slo:mean_ttft_ms=500,p99_itl_ms=60. Exit code 3 means that no plan serves every adapter: the output
    says which ones, and what would help. Ctrl-C gives the best plan so far.

    \b
    Examples:
      packer solve examples/workloads/azure-conv-2023.csv --objective gpus
      packer solve fleet.csv --objective latency --gpus 4
      packer solve fleet.csv --objective cost --profile big.toml --profile small.toml --price small.toml=1.2
      packer solve fleet.csv --solver auto --predictor forest --time-limit 60 -o plan.json --force
    """
    from packer.io.profiles import load_profile
    from packer.io.workloads import read_workload
    from packer.solvers.api import solve as run

    path = output if output is not None or as_json else DEFAULT_OUTPUT
    check_output(path, force=force)
    names = profile_names or (options.DEFAULT_PROFILE,)
    profiles = priced({name: load_profile(name) for name in names}, prices)
    fleet = read_workload(workload_path)
    for profile in profiles:
        note_estimated(profile, quiet=quiet)
    with interruptible() as stop, progress_bar(quiet=quiet) as progress:
        plan = run(
            fleet,
            profiles,
            objective,
            solver=solver,
            predictor=predictor,
            max_gpus=gpus,
            seed=seed,
            time_limit_s=time_limit_s,
            max_replicas=max_replicas,
            confidence=confidence,
            margin=margin,
            verify=verify,
            progress=progress,
            stop=stop,
        )
    return finish(plan, path, named=output is not None, force=force, as_json=as_json, quiet=quiet)


def priced(profiles: dict[str, Profile], prices: Sequence[str]) -> list[Profile]:
    """The profiles with the prices that were given for some of them, as NAME=PRICE."""
    from dataclasses import replace

    found = dict(profiles)
    for item in prices:
        name, _, text = item.rpartition("=")
        try:
            price = float(text)
        except ValueError:
            price = -1.0
        if name not in found or not 0.0 <= price < 1e9:
            known = ", ".join(found)
            raise click.UsageError(
                f"--price: expected PROFILE=PRICE with one of {known} and a price >= 0, got {item[:80]!r}."
            )
        found[name] = replace(found[name], gpu=replace(found[name].gpu, price_per_hour=price))
    return list(found.values())


def finish(plan: Plan, path: str | None, *, named: bool, force: bool, as_json: bool, quiet: bool) -> int:
    """Print and write a plan; the exit code. An infeasible one is written only to a file that was named."""
    from packer.cli.plan_table import show_plan
    from packer.io.plans import plan_to_dict, write_plan
    from packer.plan import Status

    infeasible = plan.status is Status.INFEASIBLE
    written = path is not None and (named or not infeasible)
    if path is not None and written:
        write_plan(plan, path, force=force)  # first: whoever reads the output may close the pipe
    if as_json:
        print_json(plan_to_dict(plan))
    elif not quiet:
        show_plan(plan)
    if written:
        note(f"wrote {path}", quiet=quiet)
    if plan.verified is False:
        note("the twin does not confirm every GPU; a higher --confidence leaves more room", quiet=quiet)
    if plan.interrupted:
        note("interrupted: this is the best plan so far", quiet=quiet)
        return 130
    return 3 if infeasible else 0
