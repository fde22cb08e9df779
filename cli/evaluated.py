"""Text output of an evaluated plan: servers as planned and now, whether the plan holds, and which rates drifted."""

from __future__ import annotations

from collections.abc import Sequence
from shlex import quote
from typing import TYPE_CHECKING

import packer
from packer.cli.output import Judged, Part, Table, console, figures, heads
from packer.cli.plan_table import outages, result_of, servers, unstarted
from packer.gpu import serves
from packer.io.shipped import table
from packer.room import reached
from packer.words import counted, listed, number, plural

if TYPE_CHECKING:
    from packer.cli.evaluate import ObservedTraffic
    from packer.operate.drift import Drift
    from packer.operate.evaluate import PlanEvaluation


SHOWN = 10
_BESIDE = table("packer.cli", "metrics.toml")["evaluated"]
"""Figure → priority. Each figure is shown next to the plan's; a narrow terminal shows the lowest numbers only."""


def servers_table(plan: packer.Plan, found: PlanEvaluation) -> Table:
    """Table of each server's figures as evaluated now, next to the figures in the plan."""
    pairs_shown = max(1, (console().width - 44) // 17)
    names = tuple(name for name, place in _BESIDE.items() if place <= pairs_shown)
    columns = ["server", "adapters"]
    columns += [text for head in heads(names) for text in (head, "(plan)")] + ["headroom", "result"]
    rows = []
    for k, gpu in enumerate(found.gpus):
        new = found.plan.evaluations[k]
        pairs = zip(figures(new.to_show(), names), figures(found.before[k].to_show(), names), strict=True)
        cells = [cell for pair in pairs for cell in pair]
        adapters = len(found.plan.bins[k].adapters)
        result = "slow" if gpu in found.over_limits else result_of(new)
        rows.append([gpu, adapters, *cells, found.plan.headroom_words[k], result])
    title = f"{plan.workload.name}: as evaluated now by {found.plan.predictor}; (plan): as planned by {plan.predictor}"
    return Table(title, columns, rows, left=())


def conclusion_lines(found: PlanEvaluation) -> list[Part]:
    """Say whether the plan holds, which server breaks first, and which profiles were evaluated."""
    from packer.solvers.candidates import ignored_words

    plan = found.plan
    lines: list[Part] = []
    unlimited = plan.workload.slo.is_none
    if dead := unstarted(plan, found.gpus):
        lines.append(f"{dead[0].upper()}{dead[1:]}.")
    if found.over_limits:
        goal = plan.goal if plan.limits else plan.workload.slo
        what = "Requests queue without end" if unlimited else f"Latency limits ({goal}) break"
        few = ": adapters with few requests may wait for more than twice their limit" if found.by_few else ""
        lines.append(f"{what} on {plural(len(found.over_limits), 'server')} {listed(found.over_limits, SHOWN)}{few}.")
    if found.breaks_first is not None:
        factor = plan.headroom[found.gpus.index(found.breaks_first)]
        room = "no headroom" if factor is None else f"the least headroom: {reached(factor)}"
        lines.append(f"Server {found.breaks_first} {'breaks first' if found.broken else f'has {room}'}.")
    if plan.unplaced:
        lines += _unplaced(plan)
    lines += [f"Outage: {each}." for each in outages(plan.workload, plan.bins)]
    lines += [f"{each}." for each in ignored_words(plan.workload, [item.profile for item in plan.bins])]
    lines.append(f"Evaluated for {servers(plan.bins)}, seed {plan.seed}.")
    late = len(found.over_limits) if plan.limits else 0
    said = conclusion(len(found.broken), len(found.gpus), len(plan.unplaced), late)
    if (found.breaks_without or found.holds) and not plan.statistics["lost"] and plan.spare:
        said = spare_lines(plan, found.breaks_without)[0]
    elif not found.holds and not found.broken and not plan.unplaced:
        how = ": requests queue without end" if unlimited else " its latency limits"
        said = f"The plan breaks{how}. packer solve --from makes the next one."
    elif found.holds and found.beyond and not any(found.beyond):
        said = f"The plan holds in {counted(len(found.beyond), 'simulated hour')}."
    elif found.over_limits and found.holds and not plan.limits:
        said = f"The plan holds. It was made for {plan.objective}, not for these limits."
    elif found.holds and found.rarely:  # a reason of the plan says in how many hours, and for which adapter
        said = "The plan holds: its latency limits break rarely."
    lines.append(Judged(said, found.holds))
    if found.holds or not (found.over_limits or found.broken):
        lines += [f"{reason}." for reason in plan.reasons]
    elif found.rarely:
        lines.append(f"{found.rarely}.")
    return lines


def spare_lines(plan: packer.Plan, lost: Sequence[int]) -> list[str]:
    """Say of a plan with a spare server whether it holds without any one; `lost`: servers without which it breaks."""
    if not plan.spare:
        return []
    which = "server" if len(lost) == 1 else "any of servers"
    broken = f"The plan breaks when {which} {listed(lost, SHOWN)} is lost. packer solve --from makes the next one."
    return [broken if lost else "The plan holds, also when any one server is lost."]


def _unplaced(plan: packer.Plan) -> list[str]:
    """Say why adapters have no server: none of their base model is left, or none has slots of their rank."""
    found: dict[str, list[str]] = {}
    for i in plan.unplaced:
        adapter = plan.workload.adapters[i]
        model = adapter.model
        other = model is not None and not any(serves(item.profile.model, model) for item in plan.bins)
        why = f"No server of the base model {model} is left" if other else "No server has slots large enough"
        found.setdefault(why, []).append(adapter.name)
    return [f"{why} for: {listed(names, SHOWN)}." for why, names in found.items()]


def conclusion(broken: int, gpus: int, unplaced: int, late: int = 0) -> str:
    """Say whether the plan holds. `broken`, `late`, `unplaced`: servers broken or beyond limits, adapters unplaced."""
    if not broken and not unplaced:
        return "The plan holds."
    without = f"{unplaced} adapter{'s have' if unplaced > 1 else ' has'} no server"
    if not broken:
        how = "The plan breaks its latency limits, and" if late else "The servers hold, but"
        return f"{how} {without}. packer solve --from makes the next plan."
    text = f"The plan breaks: {broken} of {gpus} servers{f'; {late} more break its latency limits' if late else ''}"
    return f"{text}{f', and {without}' if unplaced else ''}. packer solve --from makes the next one."


def drift_lines(plan: packer.Plan, path: str, found: Drift, traffic: ObservedTraffic, shown_s: float) -> list[Part]:
    """Table of servers at the measured rates, the rates that drifted, and the advice. `path`: the plan's file.
    `shown_s`: time in which the rates were measured, which is shorter than the window if the log is."""
    from packer.operate.view import lasting

    lines: list[Part] = [servers_table(plan, found.evaluation)]
    if found.drifted:
        rates = ((each.adapter, each.planned, each.measured) for each in found.drifted[:SHOWN])
        rows = [(a, f"{old:.4g}", f"{new:.4g}", f"{new / old - 1:+.0%}" if old else "from 0") for a, old, new in rates]
        columns = ("adapter", "planned", "measured", "change")
        lines.append(Table("Rates that drifted most, requests/s", columns, rows))
    hour = "Busiest" if traffic.log_path is not None and traffic.every_s is None else "Last"
    lines.append(
        f"{hour} {lasting(shown_s)}: offered load {number(found.measured_tok_s, 0)} tok/s, "
        f"planned for {number(found.planned_tok_s, 0)}; "
        f"{len(found.drifted)} of {len(plan.workload)} rates drifted, "
        f"{counted(len(found.new_adapters), 'new adapter')}, {len(found.silent_adapters)} silent."
    )
    lines += _newcomers(found)
    if plan.workload.arrivals.trace is not None:
        lines.append("The plan replays a trace: evaluated with Poisson arrivals at the measured rates.")
    lines += conclusion_lines(found.evaluation)
    if found.replayed is not None:
        text = found.replayed.text
        said = f"With the requests of that window as they were: {text[:1].lower()}{text[1:]}"
        lines.append(Judged(said, found.replayed.holds))
    much = found.evaluation.holds and (found.replayed is None or found.replayed.holds)
    why = f" (new adapters have {found.new_share:.0%} of the load)" if much else ""
    seen = traffic.seen_path or "seen.csv"
    first = "" if traffic.seen_path else f"--seen {seen} writes this traffic, "
    advice = {
        "keep": "Keep the plan.",
        "watch": "Keep the plan for now; make a new one when convenient.",
        "replan": f"Plan again{why}: {first}packer solve {quote(seen)} --from {quote(path)}.",
    }
    return [*lines, advice[found.advice]]


def _newcomers(found: Drift) -> list[str]:
    """Say which new adapters are evaluated, and which are not, as several base models are served."""
    plan = found.evaluation.plan
    placed = {plan.workload.names[i] for item in plan.bins for i in item.adapters}
    on = [name for name in found.new_adapters if name in placed]
    left = [name for name in found.new_adapters if name not in plan.workload.names]
    lines = [f"Evaluated on the least loaded servers with large enough slots: {listed(on, SHOWN)}."] if on else []
    return [*lines, f"Not evaluated, without a known base model: {listed(left, SHOWN)}."] if left else lines
