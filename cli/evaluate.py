"""`packer evaluate`: does a plan hold?"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import click

import packer
from packer.cli.declare import bundle, command, flag, option, typed, values
from packer.cli.evaluated import SHOWN, conclusion_lines, drift_lines, servers_table, spare_lines
from packer.cli.options import Output, PlanArgument, Writing, common
from packer.cli.output import note
from packer.cli.traffic import PlanLogOptions, PrometheusOptions, RankOptions, refuse_unused
from packer.errors import IncompatibleError, PackerError, ValidationError
from packer.operate.changes import changed_fleet
from packer.seeds import evaluating
from packer.traces.trace import Trace
from packer.words import listed, prefixed

if TYPE_CHECKING:
    from packer.operate.evaluate import PlanEvaluation
    from packer.report.metrics import Exporter
    from packer.traces.assign import Ranks
    from packer.twin.run import Run

    Seen: TypeAlias = tuple[packer.Workload, Trace | None]

_CHANGED = ("add_path", "remove", "lose")
_OF_METRICS = ("source_names",)
_OF_LOGS = ("keys", "skip", "assign")
_OF_TRAFFIC = ("every_s", "seen_path", "tolerance", "window_s", "ranks", "base", *_OF_METRICS)


@bundle
class Changes:
    """The conditions of the evaluation.

    add_path: A workload file of adapters to add.
    remove: An adapter to take away; repeatable.
    lose: A server to take away, by number, as when one of its GPUs fails: its adapters go to the others; repeatable.
    duration_s: Simulated time of each server (twin only). [default: an hour, and until starvation is clear]
    router: Simulate the plan's servers behind a live router instead of the plan's own routing.
    rewrite: PLAN was changed by hand: evaluate it and write it over the file (or to -o).
    output: Write the plan with the new figures to this file.
    """

    predictor: str = common("predictor")
    rate_factor: float = common("rate-factor")
    add_path: str | None = option("--add", metavar="WORKLOAD")
    remove: tuple[str, ...] = option(multiple=True, metavar="ADAPTER")
    lose: tuple[int, ...] = option("--lose-gpu", type=click.IntRange(min=0), multiple=True, metavar="K")
    seed: int | None = common(
        "seed", default=None, help="Seed of the evaluation.  [default: one that the search did not use]"
    )
    duration_s: float | None = common("duration")
    slo: tuple[str, ...] = common("slo")
    router: str | None = common("router")
    rewrite: bool = flag()
    output: str | None = common("output")


@bundle
class MeasuredTraffic:
    """Where traffic is measured, and how often.

    log_path: Evaluate at the rates of a log's busiest window, and with its requests as they were; with --every, at the
        rates of its last window.
    window_s: Rates are measured in windows of this length, from Prometheus in the last one.
    every_s: Repeat the measurement until interrupted. [default: once]
    listen: With --every: serve the predicted figures and the advice to Prometheus, at /metrics.
    """

    log_path: str | None = option("--log", metavar="LOG.jsonl")
    window_s: float = common("window")
    every_s: float | None = option("--every", type=click.FloatRange(min=1.0, max=1e7), metavar="SECONDS")
    listen: str | None = option(metavar="HOST:PORT")

    def reader(
        self, metrics: PrometheusOptions, reading: PlanLogOptions | None = None, *, once: bool
    ) -> Callable[[], Seen] | None:
        """Return a function that measures the fleet, or None if no source of traffic is given. `once`: measure the
        busiest window of a log, and return the log; otherwise its last window."""
        from packer.operate.observe import latest_of_metrics, log_of_plan, seen_in_log
        from packer.traces.access_log import USUAL

        path = self.log_path
        if path is not None:
            refuse_unused("--log", ("url", "export_path", *_OF_METRICS))
            fields = USUAL if reading is None else reading.fields()

            def measure() -> Seen:
                log = log_of_plan(path, fields, None if once else self.window_s)
                return seen_in_log(log, self.window_s, busiest=once), log if once else None

            return measure
        for each in typed(_OF_LOGS):
            raise IncompatibleError(f"{each} says how a log is read: expected --log LOG with it.")
        if metrics.url is None and metrics.export_path is None:
            return None
        metrics.check()

        def read() -> Seen:
            found = metrics.read(span_s=self.window_s, window_s=self.window_s)
            return latest_of_metrics(found, metrics.place), None

        return read

    @contextmanager
    def exporter(self, out: Output) -> Iterator[Exporter]:
        """Yield an exporter that serves its text to Prometheus at the address of --listen (if given) in the block."""
        from packer.report.metrics import Exporter

        exporter = Exporter()
        with exporter.listen(self.listen) if self.listen else nullcontext(0) as port:
            if self.listen:
                out.note(f"serving metrics at http://{self.listen.rpartition(':')[0]}:{port}/metrics")
            yield exporter


@bundle
class ObservedTraffic(MeasuredTraffic):
    """Observed traffic to evaluate the plan with.

    tolerance: A rate that differs by more than this share counts as drifted; new adapters with more than this share of
        the load need another plan.
    seen_path: Write the measured workload here each time, for packer solve --from.
    """

    tolerance: float = option(type=click.FloatRange(min=0.0, max=100.0), default=0.25, metavar="X")
    seen_path: str | None = option("--seen", metavar="FILE")


@command
def evaluate(
    file: PlanArgument, changes: Changes, traffic: ObservedTraffic, metrics: PrometheusOptions,
    reading: PlanLogOptions, ranks: RankOptions, out: Writing,
) -> int:  # fmt: skip
    """Whether a plan holds: with another seed or predictor, a changed fleet, or the traffic measured.

    Servers keep their settings. An adapter that comes, or whose server is lost, goes to the least loaded server with
    large enough slots, of those with the nearest limits. Rates are taken without the plan's margin. A plan with a spare
    GPU (--spare 1) has to hold after the loss of any one server, too, unless --lose-gpu is given.

    With --log, --url or --input the rates are those measured, and the advice is "keep", "watch" (rates drifted or
    adapters are new) or "replan".

    Exit code 3 means that a server starves or does not start, that an adapter has no server, that the plan's latency
    limits break, or "replan": packer solve --from makes the next plan. Without output it means that Prometheus failed.

    \b
    Examples:
      packer evaluate plan.json --seed 7 --duration 14400
      packer evaluate plan.json --rate-factor 1.2 --add new.csv --remove old-adapter
      packer evaluate plan.json --lose-gpu 0
      packer evaluate changed.json --rewrite
      packer evaluate plan.json --router affinity
      packer evaluate plan.json --log access.jsonl --seen seen.csv
      packer evaluate plan.json --url http://prometheus:9090 --every 300 --listen 0.0.0.0:9877
    """
    from packer.operate.evaluate import held_to

    out.check(changes.output, traffic.seen_path)
    read = traffic.reader(metrics, reading, once=traffic.every_s is None)
    for each in typed(_OF_TRAFFIC) if read is None else ():
        raise ValidationError(f"Expected one of --log, --url and --input with {each}.")
    if traffic.listen is not None and traffic.every_s is None:
        raise ValidationError("--listen serves what is measured again and again: give --every too.")
    plan = file.plan(changed=changes.rewrite)
    add = packer.read_workload(changes.add_path).adapters if changes.add_path else ()
    if changes.slo:
        plan = held_to(plan, changes.slo, add)
    out.note_profiles(*(item.profile for item in plan.bins))
    if changes.router is not None:
        return _routed(plan, changes, out)
    if read is not None:
        return _follow(plan, file.plan_path, read, changes, traffic, ranks, out)
    with out.progress() as progress:
        given = values(changes, "add_path", "router", "rewrite", "output", "slo")
        found = packer.evaluate_plan(plan, **given, add=add, progress=progress)
    _check_judged(found, changes)
    _write(found, changes.output or (file.plan_path if changes.rewrite else None), out)
    out.result(found.to_dict, lambda: [servers_table(plan, found), *conclusion_lines(found)])
    return 0 if found.holds else 3


def _check_judged(found: PlanEvaluation, changes: Changes) -> None:
    """Raise if --slo was given and the predictor gives no latencies of adapters to compare with it."""
    from packer.operate.evaluate import UNJUDGED

    asked = changes.slo and not found.plan.workload.slo.is_none
    if asked and any(each.startswith(UNJUDGED) for each in found.plan.reasons):
        refuse_unused(f"--predictor {changes.predictor}", ("slo",))


def _routed(plan: packer.Plan, changes: Changes, out: Writing) -> int:
    """Simulate the servers behind a live router. Return 3 if they starve or break the plan's limits, otherwise 0."""
    from packer.cli.cluster import lines_of
    from packer.cli.simulate import result_of as figures_of
    from packer.operate.evaluate import breaks_without, holds_routed

    refuse_unused("--router", (*_CHANGED, "predictor", "rewrite", "output", "log_path", "url", "export_path"))
    fleet = changed_fleet(plan.workload, rate_factor=changes.rate_factor)[0]
    seed = evaluating(plan.seed) if changes.seed is None else changes.seed

    def run_of(cluster: packer.Cluster) -> Run:
        given: dict[str, Any] = {"router": changes.router, "seed": seed, "duration_s": changes.duration_s}
        return packer.simulate_cluster(fleet, cluster, **given)

    run = run_of(plan.cluster())
    kept = holds_routed(plan, run)
    lost = breaks_without(plan, run_of) if kept else ()
    result = {**figures_of([run]), "holds": kept and not lost, "breaks_without_servers": lost}
    said = [] if kept or run.starved else [f"The plan breaks its latency limits behind this router: {plan.goal}."]
    said += spare_lines(plan, lost) if kept else []
    out.result(result, lambda: [*lines_of([run], result), *said])
    return 0 if result["holds"] else 3


def _follow(
    plan: packer.Plan, path: str, read: Callable[[], Seen], changes: Changes, traffic: ObservedTraffic,
    ranks: RankOptions, out: Writing,
) -> int:  # fmt: skip
    """Evaluate at the measured rates, once or every `traffic.every_s` seconds."""
    from packer.io.workloads import write_workload
    from packer.operate.drift import with_base
    from packer.operate.view import surge_of
    from packer.report.metrics import metrics_text
    from packer.traces.measure import rounded
    from packer.traces.pattern import busiest_requests, rates_of

    refuse_unused("measured traffic", (*_CHANGED, "rate_factor", "duration_s", "rewrite"))
    if not plan.bins:
        raise IncompatibleError("The plan has no GPUs, so there is nothing to evaluate.")
    with traffic.exporter(out) as exporter:
        while True:
            seen = None
            with _noted(traffic):
                with out.progress(f"reading {traffic.log_path}" if traffic.log_path else "reading metrics"):
                    measured, log = read()
                seen, given_ranks = with_base(plan, measured, ranks.base), ranks.read()
            if seen is not None:
                notes = given_ranks.unseen(measured.names) if traffic.every_s is None else []
                given: dict[str, Any] = {"tolerance": traffic.tolerance, "predictor": changes.predictor}
                given |= {"seed": changes.seed, "in_log": traffic.log_path is not None}
                shown_s = traffic.window_s
                if log is not None:
                    table = rates_of(log, traffic.window_s)
                    notes += [*log.notes, *surge_of(table)]
                    requests, shown_s = busiest_requests(log, table), table.busiest_s[1]
                    named = dict(zip(measured.names, seen.names, strict=True))
                    requests = replace(requests, names=tuple(named[name] for name in requests.names))
                    given["requests"] = requests, traffic.window_s
                for each in notes:
                    out.note(each)
                found = packer.drift(plan, _placeable(plan, seen, given_ranks, out), **given)
                _check_judged(found.evaluation, changes)
                exporter.text = metrics_text(found.evaluation.plan, found.to_dict(), time.time())
                try:  # files first: the reader of the output may close the pipe
                    with _noted(traffic):
                        _write(found.evaluation, changes.output, out)
                        if traffic.seen_path is not None:
                            write_workload(rounded(_ranked(plan, seen, given_ranks)), traffic.seen_path, force=True)
                finally:
                    out.result(found.to_dict, partial(drift_lines, plan, path, found, traffic, shown_s))
                if traffic.every_s is None:
                    return 3 if found.advice == "replan" else 0
            time.sleep(traffic.every_s or 0.0)


@contextmanager
def _noted(traffic: ObservedTraffic) -> Iterator[None]:
    """With --every, note an error: the server may be reachable, or a rank be known, the next time."""
    try:
        yield
    except PackerError as error:
        if traffic.every_s is None:
            raise
        note(str(error))


def _write(found: PlanEvaluation, path: str | None, out: Writing) -> None:
    from packer.io.plans import write_plan

    if path is not None:
        write_plan(found.plan, path, force=True)
        out.note(f"wrote {path}")


def _ranked(plan: packer.Plan, seen: packer.Workload, given: Ranks) -> packer.Workload:
    """The measured fleet with ranks: those of the plan, and those that are given for new adapters."""
    known = {adapter.name: adapter.rank for adapter in plan.workload.adapters}
    known |= {adapter.name: 0 for adapter in seen.adapters if not adapter.rank}
    found = replace(given, table={**known, **given.table}).of(seen.names)
    adapters = tuple(replace(a, rank=rank) for a, rank in zip(seen.adapters, found, strict=True))
    return replace(seen, adapters=adapters)


def _placeable(plan: packer.Plan, seen: packer.Workload, given: Ranks, out: Output) -> packer.Workload:
    """`_ranked`; where no rank is given for a new adapter, it gets the plan's largest, which is noted."""
    known = {*plan.workload.names, *given.table}
    unknown = [each.name for each in seen.adapters if each.rank and each.name not in known]
    if given.others or not unknown:
        return _ranked(plan, seen, given)
    largest = max(1, *plan.workload.ranks.tolist())
    said = f"{listed(unknown, SHOWN)}: no rank is given (--rank); taken to be {largest}, the plan's largest."
    out.note(f"{said}{prefixed(unknown, known)}".removesuffix("."))
    return _ranked(plan, seen, replace(given, others=(largest,)))
