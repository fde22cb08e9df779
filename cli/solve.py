"""`packer solve`: a workload becomes a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

import packer
from packer import checks
from packer.cli.declare import bundle, command, option
from packer.cli.kinds import KindArguments
from packer.cli.options import FleetFile, Writing, common, waited_s
from packer.cli.output import import_meanwhile, interruptible, write_frame
from packer.cli.traffic import refuse_unused
from packer.errors import IncompatibleError, OutputError, PackerError

DEFAULT_OUTPUT = "plan.json"
OUTPUT = f"Where to write the plan.  [default: {DEFAULT_OUTPUT}, over an earlier plan; with --json nowhere]"
DEFAULT_PREDICTOR = "auto"
REPLAY = "replay"  # Value of --load that replays the requests of a trace unchanged.
TO_PRINT = (*(f"packer.report.{name}" for name in ("context", "energy", "prefixes")), "rich.console", "rich.table")
"""Modules that printing a plan needs."""


@bundle
class Planning:
    """Load, objective and search options of a plan.

    old_path: A running plan to follow: within its latency limits, fewest GPUs, then few adapters moved.
    objective: What a good plan is: gpus, latency, slo:…, cost, … [default: the fewest GPUs on which every adapter keeps
        --slo; with --solver or --predictor gpus]
    solver: How the plan is searched. [default: greedy; on a given number of GPUs spread-refined]
    load: Plan for this load of a trace: its mean, its busiest hour, every adapter's own busiest hour, a percentile, or
        its requests as they were; or for a column of --loads. [default: of a trace peak]
    loads_path: Rates of each adapter at each load, as packer workload from-… --loads writes them. [default:
        measured from the trace]
    add_path: Plan for these adapters as well: a workload file.
    min_gpus: Fewest GPUs of the plan, for more room than the goal takes. [default: as few as keep the goal]
    spare: GPUs that may fail: with 1 the plan keeps --slo on the others. [default: as many as of the plan of --from,
        else 0]
    confidence: How sure the plan is to hold, given the profile's error. [default: 0.95]
    verify: Simulate the finished plan with a fresh seed.
    """

    old_path: str | None = option("--from", metavar="PLAN")
    objective: str | None = common("objective")
    slo: tuple[str, ...] = common("slo")
    solver: str | None = common("solver")
    predictor: str = common("predictor", default=DEFAULT_PREDICTOR)
    load: str | None = option(metavar="peak|mean|each-peak|pNN|replay")
    loads_path: str | None = option("--loads", metavar="FILE.csv")
    rate_factor: float = common("rate-factor")
    add_path: str | None = option("--add", metavar="FILE")
    gpus: int | None = common("gpus")
    min_gpus: int | None = option(type=click.IntRange(min=1, max=1_000_000), metavar="N")
    max_replicas: int | None = common("max-replicas")
    spare: int | None = option(type=click.IntRange(min=0, max=1), metavar="0|1")
    confidence: float | None = option(type=click.FloatRange(min=0.5, max=0.99), metavar="P")
    margin: float | None = common("margin")
    verify: bool = option("--verify/--no-verify", default=True)
    time_limit_s: float | None = common("time-limit")
    seed: int = common("seed")

    def at_load(
        self, fleet: packer.Workload, path: str, out: Writing
    ) -> tuple[packer.Workload, packer.RequestTrace | None]:
        """The fleet at --load, of a log its busiest hour; the requests of that hour if it has their rates."""
        if self.load is None and self.loads_path is not None:
            raise IncompatibleError("--loads goes with --load NAME, which says for which of them to plan.")
        if self.load is None and fleet.arrivals.trace is None:
            return fleet, None
        if self.load is not None and (self.loads_path is not None or fleet.arrivals.trace is None):
            from packer.operate.observe import at_load

            return at_load(fleet, self.load, self.loads_path), None
        from packer.operate.observe import observe_replayed
        from packer.operate.project import is_log

        if self.load == REPLAY or (self.load is None and not is_log(path)):
            out.note("planned for its requests as they were: in hindsight, without a margin")
            return fleet, None
        found = observe_replayed(fleet, self.load or "peak")
        other = "" if self.load else f"; --load {REPLAY} plans for its requests as they were"
        for text in (f"log of {found.span}: planned for {found.planned_for}{other}", *found.notes):
            out.note(text)
        return found.fleet, found.hour

    def changed(self, fleet: packer.Workload) -> packer.Workload:
        """Return the fleet with the adapters of --add and all rates times --rate-factor."""
        from packer.operate.changes import changed_fleet

        add = () if self.add_path is None else packer.read_workload(self.add_path).adapters
        return changed_fleet(fleet, rate_factor=self.rate_factor, add=add)[0]

    def remaining_s(self) -> float | None:
        """Return the rest of the time limit, s, which starts with the command; None without a limit."""
        from packer.solvers.base import limit_of

        return limit_of(checks.time_limit(self.time_limit_s) - waited_s())

    def recommends(self, old: packer.Plan | None) -> bool:
        """Whether to call `recommend`: no strategy is given; `old`, if any, is a recommended plan of one profile."""
        chosen = self.objective, self.solver
        free = all(each is None for each in chosen) and self.predictor == DEFAULT_PREDICTOR
        alike = old is None or len({item.profile for item in old.bins}) == 1
        return free and alike and (old is None or old.objective == "recommend")

    def planned(
        self, fleet: packer.Workload, kinds: list[packer.GpuKind], old: packer.Plan | None, later: Sequence[str],
        hour: packer.RequestTrace | None, **given: Any,
    ) -> packer.Plan:  # fmt: skip
        """Return the plan for the objective, or else the plan to deploy, which must hold in an `hour` of a log, too.
        `later`: modules to import meanwhile."""
        from packer.twin.engine.compile import begin

        begin()  # compile kernels during the imports
        from packer.solvers.replan import objective_of

        recommend, solve = packer.recommend, packer.solve  # imported first: the thread would delay it
        import_meanwhile(*later)
        given |= {"max_gpus": self.gpus, "seed": self.seed, "verify": self.verify}
        given |= {"time_limit_s": self.remaining_s(), "old_plan": old}
        given |= {"confidence": self.confidence, "margin": self.margin, "max_replicas": self.max_replicas}
        if self.recommends(old):
            return recommend(fleet, kinds, log_hour=hour, spare=self.spare, min_gpus=self.min_gpus, **given)
        follows = old is not None and self.objective is None and "slo_used" in old.limits
        stays = old is not None and not set(fleet.names).isdisjoint(old.workload.names)
        kept = "gpus" if old is None else objective_of(old, stays=stays, spare=self.spare is None)
        objective = self.objective or kept
        solver = self.solver or ("replan" if stays else None)
        slo = fleet.slo if self.slo or follows else None
        return solve(fleet, kinds, objective, slo=slo, solver=solver, predictor=self.predictor, **given)


@bundle
class PlanOutput:
    """Where the plan goes.

    per_adapter: Write what each adapter gets, and its share of the price: .csv or .parquet.
    """

    output: str | None = common("output", help=OUTPUT)
    per_adapter: str | None = option(metavar="FILE")

    def replacing(self, out: Writing) -> Writing:
        """Return `out`; without -o it may also overwrite an earlier plan that packer wrote and no one changed."""
        if self.output is not None or out.as_json or out.force or not Path(DEFAULT_OUTPUT).is_file():
            return out
        try:
            packer.load_plan(DEFAULT_OUTPUT)
        except PackerError:
            return out  # not an unchanged plan: `check` refuses it before the search
        return replace(out, force=True)


@command
def solve(file: FleetFile, servers: KindArguments, planning: Planning, result: PlanOutput, out: Writing) -> int:
    """Plan: how many GPUs, which adapter where, how to start each server.

    WORKLOAD is a CSV, JSON, YAML or Parquet file of adapters with rank and rate. Without an objective, the plan is the
    one to deploy: fewest GPUs on which every adapter keeps the latency goal at rates raised by the margin.

    Objectives take parameters as in slo:mean_ttft_ms=500,p99_itl_ms=60. --from PLAN matches adapters by name with the
    running plan. Servers keep their order; where one stops, later ones move up, and the output says so.

    Exit code 3 means that no plan serves every adapter, or none keeps the goal: the output says which ones, and what
    would help. Ctrl-C gives the best plan so far.

    \b
    Examples:
      packer solve examples/workloads/azure-conv-2023.csv
      packer solve trace.csv
      packer solve fleet.csv --rate-factor 2 --add new.csv
      packer solve fleet.csv --objective gpus
      packer solve fleet.csv --objective latency --gpus 4
      packer solve fleet.csv --objective cost --profile big.toml --profile small.toml --price small.toml=1.2
      packer solve new.csv --from plan.json -o next.json
    """
    from packer.cli.plan_table import adapters_frame, plan_json, plan_lines
    from packer.gpu import kinds_of
    from packer.operate.changes import with_goal
    from packer.twin.hours import with_adapters

    path = result.output if result.output is not None or out.as_json else DEFAULT_OUTPUT
    out = result.replacing(out)
    out.check(path)
    out.check(result.per_adapter, what="table")
    old = None if planning.old_path is None else packer.load_plan(planning.old_path)
    if old is not None:  # the plan's servers are used, even if packer.toml names others
        refuse_unused("--from", ("profile_names", "gpu_names", "model", "settings", "prices", "available"))
    if planning.spare and not planning.recommends(old):
        rule = "--spare goes without an objective and a solver, of a running plan too:"
        raise IncompatibleError(f"{rule} gpus:spare=1 is one.")
    if planning.min_gpus is not None and not planning.recommends(old):
        raise IncompatibleError(
            "--min-gpus goes without an objective and a solver: a spreading objective takes --gpus."
        )
    fleet = file.fleet()
    fleet = fleet if old is None else with_goal(fleet, old)
    fleet, hour = planning.at_load(fleet, file.workload_path, out)
    fleet = planning.changed(fleet).held_to(planning.slo or None)
    hour = hour if planning.rate_factor == 1.0 else None
    rank = int(fleet.ranks.max())
    kinds = servers.kinds(rank) if old is None else list(kinds_of([item.profile for item in old.bins]))
    out.note_profiles(*[kind.profile for kind in kinds])
    with interruptible() as stop, out.progress() as progress:
        later = ("packer.io.plans", *(() if out.as_json or out.quiet else TO_PRINT))
        plan = planning.planned(fleet, kinds, old, later, hour, progress=progress, stop=stop)
    plan = replace(plan, runtime_s=waited_s())
    infeasible = plan.status is packer.Status.INFEASIBLE
    written = path is not None and (result.output is not None or not infeasible)
    by_default = old is None and not (servers.profile_names or servers.gpu_names)
    lines = partial(plan_lines, plan, old, by_default=by_default, briefly=True)
    if path is not None and written:
        from packer.io.plans import write_plan

        try:
            write_plan(plan, path, force=out.force)  # first: the reader of the output may close the pipe
        except OutputError:
            if not out.as_json:
                out.result(dict, lines)  # the search may have taken minutes
            raise
    if result.per_adapter is not None:
        write_frame(adapters_frame(with_adapters(plan)), result.per_adapter)
    out.result(partial(plan_json, plan), lines)
    if written:
        out.note(f"wrote {path}; packer export starts it, packer show says more: bound, energy, tightest adapter")
    elif path is not None:
        out.note(f"{path} is not written: the plan does not hold (-o FILE writes it all the same)")
    if plan.verified is False and not planning.recommends(old):
        out.note("the twin does not confirm every server; a higher --confidence leaves more room")
    if plan.interrupted:
        out.note("interrupted: this is the best plan so far")
        return 130
    return 3 if infeasible else 0
