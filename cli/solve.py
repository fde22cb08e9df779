"""`packer solve`: a workload becomes a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from packer.cli.declare import bundle, command, option
from packer.cli.interrupt import interruptible
from packer.cli.options import (
    DEFAULT_PROFILE,
    FleetFile,
    Writing,
    complete_registered,
    gpus_option,
    predictor_option,
    profile_option,
    seed_option,
    time_limit_option,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from packer.cli.output import Progress
    from packer.plan import Plan
    from packer.profile import Profile

DEFAULT_OUTPUT = "plan.json"


@bundle
class Servers:
    """The kinds of server to plan with."""

    profile_names: tuple[str, ...] = profile_option(
        multiple=True,
        help=f"The server: a shipped profile or a profile file; repeatable.  [default: {DEFAULT_PROFILE}]",
    )
    prices: tuple[str, ...] = option(
        "--price",
        multiple=True,
        metavar="PROFILE=PRICE",
        help="Price of a GPU per hour, for the objective cost; repeatable.  [default: the profile's]",
    )

    def profiles(self) -> list[Profile]:
        """The profiles with the prices that were given for some of them."""
        from packer.io.profiles import load_profile

        names = self.profile_names or (DEFAULT_PROFILE,)
        return priced({name: load_profile(name) for name in names}, self.prices)


@bundle
class Planning:
    """What a plan is made for and how it is searched."""

    old_path: str | None = option(
        "--from",
        metavar="PLAN",
        help="Follow a running plan: on its servers, fewest GPUs, then fewest adapters moved.",
    )
    objective: str | None = option(
        metavar="NAME",
        shell_complete=complete_registered("objective"),
        help="What a good plan is: fewest GPUs, lowest latency, …  [default: gpus; with --from moves]",
    )
    solver: str | None = option(
        metavar="NAME",
        shell_complete=complete_registered("solver"),
        help="How the plan is searched.  [default: greedy; on a given number of GPUs spread-refined]",
    )
    predictor: str = predictor_option()
    gpus: int | None = gpus_option()
    max_replicas: int = option(
        type=click.IntRange(min=1, max=10_000),
        default=1,
        metavar="N",
        help="Split an adapter that is too hot for one GPU over up to so many.",
    )
    confidence: float | None = option(
        type=click.FloatRange(min=0.5, max=0.99),
        metavar="P",
        help="How sure the plan is to hold, given the profile's error; raises the rates that servers must "
        "serve.  [default: 0.95]",
    )
    margin: float | None = option(
        type=click.FloatRange(min=0.0, max=10.0),
        metavar="X",
        help="That raise itself, instead of a confidence: 0.05 is 5 %; 0 for none.",
    )
    verify: bool = option(
        "--verify/--no-verify", default=True, help="Simulate the finished plan with a fresh seed."
    )
    time_limit_s: float | None = time_limit_option()
    seed: int = seed_option()

    def run(
        self,
        fleet_path: str,
        servers: Servers,
        *,
        progress: Progress,
        stop: Callable[[], bool],
        note_profiles: Callable[..., None],
    ) -> tuple[Plan, Plan | None]:
        """The plan, and the running one that it follows."""
        from packer.errors import IncompatibleError
        from packer.io.plans import read_plan
        from packer.io.workloads import read_workload
        from packer.solvers.api import solve as run

        old = None if self.old_path is None else read_plan(self.old_path)
        if old is not None and servers.profile_names:
            raise IncompatibleError("--from plans with the servers of the running plan: leave out --profile.")
        profiles = servers.profiles() if old is None else list(dict.fromkeys(b.profile for b in old.bins))
        note_profiles(*profiles)
        plan = run(
            read_workload(fleet_path),
            profiles,
            self.objective or ("gpus" if old is None else "moves"),
            solver=self.solver or (None if old is None else "replan"),
            predictor=self.predictor,
            max_gpus=self.gpus,
            seed=self.seed,
            time_limit_s=self.time_limit_s,
            max_replicas=self.max_replicas,
            confidence=self.confidence,
            margin=self.margin,
            old_plan=old,
            verify=self.verify,
            progress=progress,
            stop=stop,
        )
        return plan, old


@bundle
class Result:
    """Where the plan goes."""

    output: str | None = option(
        "-o",
        "--output",
        metavar="FILE",
        help=f"Where to write the plan.  [default: {DEFAULT_OUTPUT}; with --json nowhere]",
    )


@command
def solve(file: FleetFile, servers: Servers, planning: Planning, result: Result, out: Writing) -> int:
    """Plan: how many GPUs, which adapter where, how to start each server.

    WORKLOAD is a CSV, JSON, YAML or Parquet file of adapters with rank and rate. Objectives take parameters
    as in slo:mean_ttft_ms=500,p99_itl_ms=60. With --from PLAN, adapters are matched by name with those of
    the running plan; servers keep their numbers, new ones come at the end.

    Exit code 3 means that no plan serves every adapter: the output says which ones, and what would help.
    Ctrl-C gives the best plan so far.

    \b
    Examples:
      packer solve examples/workloads/azure-conv-2023.csv --objective gpus
      packer solve fleet.csv --objective latency --gpus 4
      packer solve fleet.csv --objective cost --profile big.toml --profile small.toml --price small.toml=1.2
      packer solve new.csv --from plan.json -o next.json
    """
    from packer.cli.plan_table import changes_lines, plan_lines
    from packer.io.plans import plan_to_dict, write_plan
    from packer.plan import Status

    path = result.output if result.output is not None or out.as_json else DEFAULT_OUTPUT
    out.check(path)
    with interruptible() as stop, out.progress() as progress:
        plan, old = planning.run(
            file.workload_path, servers, progress=progress, stop=stop, note_profiles=out.note_profiles
        )
    infeasible = plan.status is Status.INFEASIBLE
    written = path is not None and (result.output is not None or not infeasible)
    if path is not None and written:
        write_plan(plan, path, force=out.force)  # first: whoever reads the output may close the pipe
    out.result(
        lambda: plan_to_dict(plan),
        lambda: [*plan_lines(plan), *(changes_lines(old, plan) if old is not None else [])],
    )
    if written:
        out.note(f"wrote {path}")
    if plan.verified is False:
        out.note("the twin does not confirm every GPU; a higher --confidence leaves more room")
    if plan.interrupted:
        out.note("interrupted: this is the best plan so far")
        return 130
    return 3 if infeasible else 0


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
