"""Text output of a plan: one row per server, then totals, status and reasons."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import packer
from packer.cli.changes import changes
from packer.cli.output import Judged, Part, Table, console, figures, heads
from packer.errors import UnknownNameError
from packer.evaluation import PLAN_FIGURES, AdapterFigures
from packer.io.frames import pl
from packer.io.shipped import table
from packer.moves import places
from packer.profile import labelled
from packer.room import grouped, room_rows, spans
from packer.words import by_rank, counted, listed, money, number, plural


def plan_lines(
    plan: packer.Plan, old: packer.Plan | None = None, *, by_default: bool = False, briefly: bool = False
) -> list[Part]:
    """Return the plan's decision (if any), servers, facts and reasons, and the changes from the running plan `old`.
    `by_default`: the profile is the default. `briefly`: leave out facts that a decision does not need."""
    from packer.report.context import queueing

    gpus = [_gpus(plan)] if plan.bins else []
    first, *rest = plan.decision.split("\n")
    said: list[Part] = [Judged(first, plan.status is not packer.Status.INFEASIBLE), *rest] if first else []
    if by_default and plan.bins:
        said.append(default_words(plan))
    frontier = [_frontier(plan)] if plan.frontier else []
    frontier += [_kinds(plan)] if plan.kinds else []
    return [
        *said,
        *gpus,
        *frontier,
        *([_rooms(plan)] if plan.rooms else []),
        *_small_print(plan, briefly=briefly),
        *_band(plan),
        *(f"- {reason}" for reason in plan.reasons),
        *(f"- {note}" for note in queueing(plan)),
        *([] if old is None else changes(old, plan)),
    ]


def default_words(plan: packer.Plan) -> str:
    """Say that the plan uses the default profile."""
    names = ", ".join(dict.fromkeys(item.profile.name for item in plan.bins))
    return f"Profile     {names}, the default: --gpu and --model, or --profile, name yours"


def _kinds(plan: packer.Plan) -> Table:
    """Table of the GPUs and the price that the goal needs with each kind of server, or a mix of kinds."""
    models = ["model"] * any(row["model"] for row in plan.kinds)
    rows = []
    for row in plan.kinds:
        goal = ("kept" if row["holds"] else "broken") + " ←" * row.get("chosen", False)
        cells = [row["kinds"], row["gpus"], money(row["price_per_hour"]), goal]
        rows.append([*(row[name] or "–" for name in models), *cells])
    columns = [*models, "kinds", "GPUs", "price/h", "latency goal"]
    return Table("Kinds of server", columns, rows, left=(0, len(models), len(columns) - 1), caption=_goal(plan))


def _band(plan: packer.Plan) -> list[str]:
    """Say how the number of GPUs (or the price) depends on the error of estimated profiles."""
    if not (band := plan.estimate_band):
        return []
    most, fewest = band["most"], band["fewest"]
    low, high = fewest["gpus"] or "?", most["gpus"] or "too many"
    span = f"{low} to {high} GPUs" if low != high else "as many GPUs"
    if _priced(plan):  # the number of GPUs says little if kinds differ in price
        prices = dict.fromkeys(money(each["objective_value"]) for each in (fewest, most))
        span = f"{' to '.join(prices)} per hour"
    return [
        f"The profile is an estimate: at {most['capacity']:.2f} to {fewest['capacity']:.2f} times its capacity "
        f"the fleet takes {span}. Calibrate it (packer profiles fit) for one number."
    ]


def _priced(plan: packer.Plan) -> bool:
    """Whether the plan minimises cost."""
    return plan.objective.partition(":")[0] == "cost"


def _frontier(plan: packer.Plan) -> Table:
    """Table of latency and price for each number of GPUs."""
    nothing = {"worst_adapter_ttft_ms": None}  # of points without a completed request
    points = [row if (row["p95_ttft_ms"] or 0.0) > 0.0 else {**row, **nothing} for row in plan.frontier]
    known = {name for row in points for name, value in row.items() if value is not None}
    known -= {"goodput_tok_s"} | ({"worst_adapter_ttft_ms"} if len(plan.workload) == 1 else set())
    shown = {name: each for name, each in PLAN_FIGURES.items() if name in known}
    rows = []
    for row in points:
        broken = len(row["queueing"])
        mark = "kept" if row["holds"] else f"broken on {counted(broken, 'server')}"
        mark = mark if row["holds"] or broken else "broken when a GPU is lost"
        mark = "broken in another hour" if row["broken_later"] else mark
        cells = [number(row[name], label.digits) for name, label in shown.items()]
        rows.append([row["n_gpus"], *cells, mark + (" ←" if row["n_gpus"] == plan.n_gpus else "")])
    columns = ["GPUs", *(label.head for label in shown.values()), "latency goal"]
    return Table("GPUs against latency", columns, rows, left=(len(columns) - 1,), caption=_goal(plan))


def _goal(plan: packer.Plan) -> str:
    """Say what the goal is, and at which rates and in which hours plans are checked against it."""
    judged = [_raised(plan)] if plan.margin else []
    judged += ["in several hours"] if plan.workload.arrivals.trace is None else []
    how = f", judged {' and '.join(judged)}; figures at the rates as given" if judged else ""
    return f"The goal: {plan.goal}{how}."


def _raised(plan: packer.Plan) -> str:
    """Words about the margin: of several profiles the largest one."""
    most = "up to " if len({item.profile for item in plan.bins}) > 1 else ""
    return f"with rates raised by {most}{plan.margin or 0.0:.1%}"


def _gpus(plan: packer.Plan) -> Table:
    labels = labelled(item.profile for item in plan.bins)
    several, gpus = len(labels) > 1, {label.partition("/")[0] for label in labels.values()}
    short = len({label.partition("/")[2] for label in labels.values()}) == 1 and len(gpus) == len(labels)
    columns = ["server", *(["kind"] if several else []), "adapters by rank", "max_loras × rank"]
    width = console().width
    shown = _FIGURES if width >= WIDE else _FIGURES[:-1] if width >= NARROW else _FIGURES[2:-1]
    columns += [*heads(shown), "headroom"]
    columns += ["problem"] if not plan.evaluations.feasible.all() else []
    rows, headroom = [], plan.headroom_words
    for k, item in enumerate(plan.bins):
        row, split = plan.evaluations[k], sum(share < 1.0 for share in item.shares)
        kind = labels[item.profile].partition("/")[0] if short else labels[item.profile]
        ranks = by_rank(plan.workload.ranks[list(item.adapters)].tolist())
        held = f"{ranks} ({split}×shared)" if split else ranks
        slots = f"{item.max_loras} × {item.max_lora_rank}"
        rows.append([k, *([kind] * several), held, slots, *figures(row.to_show(), shown), headroom[k]])
        if columns[-1] == "problem":
            rows[-1].append("" if row.feasible else f"{result_of(row)}, {row.served_share:.0%} served")
    left = f"{len(plan.workload) - len(set(plan.unplaced)):,} of " if plan.unplaced else ""
    adapters = f"{left}{counted(len(plan.workload), 'adapter')}"
    title = f"Plan for {plan.workload.name!r}: {adapters}, {counted(plan.n_gpus, 'GPU')}"
    return Table(title, columns, rows, left=(1, 2) if several else (1,))


_FIGURES = ("offered_tok_s", "mean_ttft_ms", "worst_adapter_ttft_ms", "mean_itl_ms", "slo_attainment")


def _rooms(plan: packer.Plan) -> Table:
    """Headroom of servers, its limit and what helps; equal servers share a row, the `SHOWN_ROOMS` least first."""
    shown = grouped(plan.rooms)[:SHOWN_ROOMS]
    columns = ["server", "headroom", "what limits it", "what helps"]
    more = len(plan.rooms) - sum(len(gpus) for gpus, _ in shown)
    caption = f"Not shown: {counted(more, 'server')} with as much headroom or more." if more else None
    return Table("Headroom", columns, room_rows(plan.rooms, SHOWN_ROOMS), left=(2, 3), caption=caption)


SHOWN_ROOMS = 8
WIDE, NARROW = 100, 72  # Terminal widths, columns, from which all figures of a server are shown, or all but one.


def adapter_rows(plan: packer.Plan, names: Iterable[str]) -> list[dict[str, Any]]:
    """Rank, rate, shares by server, price and figures of adapters; raises `UnknownNameError` for other names."""
    where, number_of = places(plan), {name: i for i, name in enumerate(plan.workload.names)}
    figures_of = {} if plan.adapters is None else plan.adapters.to_show()._asdict()
    figures_of["price_per_hour"] = _prices(plan)
    found = []
    for name in names:
        if name not in number_of:
            raise UnknownNameError("adapter", name, number_of)
        i, rank = number_of[name], plan.workload.adapters[number_of[name]].rank
        got = {key: None if math.isnan(row[i]) else float(row[i]) for key, row in figures_of.items()}
        rate = float(plan.workload.given_rates[i])
        found.append({"adapter": name, "rank": rank, "rate": rate, "servers": where.get(name, {}), **got})
    return found


def _prices(plan: packer.Plan) -> Any:
    """Price of each adapter, float64 (n,), by its share of the load of each of its servers; NaN without its price."""
    import numpy as np

    fleet, prices = plan.workload, np.zeros(len(plan.workload))
    for item in plan.bins:
        own, price = list(item.adapters), item.profile.gpu.price_per_hour
        loads = item.rates(fleet) * fleet.mean_tokens[own]
        prices[own] += (math.nan if price is None else price) * loads / loads.sum()
    return prices


def adapters_frame(plan: packer.Plan) -> pl.DataFrame:
    """One row for each adapter of a plan: SLO class, rank, rate, servers and figures."""
    fleet = plan.workload
    rows = [
        {
            "adapter": row["adapter"],
            "slo_class": adapter.slo_class,
            **row,
            "servers": " ".join(map(str, row["servers"])),
        }
        for adapter, row in zip(fleet.adapters, adapter_rows(plan, fleet.names), strict=True)
    ]
    return pl.DataFrame(rows, schema_overrides={"slo_class": pl.String}, infer_schema_length=None)


ADAPTER_COLUMNS = table("packer.cli", "metrics.toml")["adapters"]  # Figure → column head, factor and digits.


def adapters_table(plan: packer.Plan, names: Iterable[str]) -> Table:
    """Table of adapters: rank, rate, servers and figures."""
    rows = []
    for row in adapter_rows(plan, names):
        several = len(row["servers"]) > 1
        where = ", ".join(f"{k} ({share:.0%})" if several else str(k) for k, share in row["servers"].items())
        shown = (
            number(None if row.get(key) is None else factor * row[key], digits)
            for key, (_, factor, digits) in ADAPTER_COLUMNS.items()
        )
        rows.append((row["adapter"], row["rank"], f"{row['rate']:.4g}", where or "none", *shown))
    heads_of = ["adapter", "rank", "req/s", "server", *(head for head, *_ in ADAPTER_COLUMNS.values())]
    return Table(f"Adapters of {plan.workload.name!r}", heads_of, rows, left=(0, 3))


def servers(bins: Iterable[packer.Bin]) -> str:
    """Labels of the servers' profiles without duplicates, as in "toy (estimated, not calibrated)"."""
    return ", ".join(sorted({item.profile.label for item in bins}))


def result_of(row: packer.Evaluation) -> str:
    """What is wrong with a server, or "holds"."""
    return "memory error" if row.memory_error else "starved" if row.starved else "holds"


def unstarted(plan: packer.Plan, numbers: Sequence[int]) -> str:
    """Which servers, by their `numbers`, do not start, and with which settings the first would; "" if all start."""
    from packer.twin.memory.starts import what_starts

    dead = [k for k, row in enumerate(plan.evaluations) if row.memory_error]
    if not dead:
        return ""
    item, which = plan.bins[dead[0]], listed([numbers[k] for k in dead])
    ways = what_starts(item.profile, item.settings, item.workload(plan.workload))
    said = f"{plural(len(dead), 'server')} {which} {'do' if dead[1:] else 'does'} not start"
    helps = f". What would start: {ways}" if ways else ""
    return f"{said}: no memory for so many slots of that rank{helps}"


def _facts(plan: packer.Plan) -> list[str]:
    """The plan's status, bound, solver, totals, profiles, energy and tightest adapter."""
    from packer.report.context import resimulated
    from packer.report.energy import energy_of
    from packer.twin.per_adapter import quiet_adapters

    offered = float(plan.evaluations.offered_tok_s.sum())
    served = float(plan.evaluations.total_token_throughput.sum())
    placed = len(plan.workload) - len(set(plan.unplaced))
    margin = f" {_raised(plan)}" if plan.margin else ""
    lines = [
        f"Status      {plan.outcome}; {_bound(plan)}{resimulated(plan)}",
        f"Found by    {plan.solver} for {plan.goal}, predicted by {plan.predictor}{margin}, "
        f"in {plan.runtime_s:.2f} s, seed {plan.seed}",
        f"Total       {placed:,} of {counted(len(plan.workload), 'adapter')} on {counted(plan.n_gpus, 'GPU')}; "
        f"offered {number(offered, 0)} tok/s, predicted throughput {number(served, 0)} tok/s",
    ]
    if plan.unplaced and plan.evaluated_s is not None:  # a search says in its reasons why adapters have no server
        lost = [plan.workload.names[i] for i in plan.unplaced]
        lines.append(f"No server   {counted(len(lost), 'adapter')}: {listed(lost, 10)}")
    if plan.bins:
        lines.append(f"Server      {servers(plan.bins)}")
    if (energy := energy_of(plan)) is not None:
        lines.append(f"Energy      {energy}")
    if plan.adapters is not None:
        lines += _tightest(plan, plan.adapters)
        lines += [f"Few         {quiet}" for quiet in [quiet_adapters(plan.workload)] if quiet]
    return lines


FOUND = 2  # Number of facts that brief output shows for a plan for an objective, whose decision has no bound.


def _small_print(plan: packer.Plan, *, briefly: bool) -> list[str]:
    """Facts, training and assumptions; `briefly`: the first `FOUND` facts, none if the plan is the fewest GPUs."""
    facts = _facts(plan)
    lines = facts if not briefly else [] if plan.objective == "recommend" else facts[:FOUND]
    training = float(plan.evaluations.tuning_tok_s.sum())
    if training and plan.workload.fine_tuning is not None:
        policy = plan.workload.fine_tuning.policy
        lines.append(f"Training    {number(training, 0)} tok/s beside the requests, by {policy}")
    said = (item.profile.provenance.get("price") for item in plan.bins)
    if sources := list(dict.fromkeys(filter(None, said))):
        lines.append(f"Price       {'; '.join(sources)}")
    if plan.workload.assumed_lengths:
        lines.append(f"Lengths     {assumed_lengths(plan.workload)}")
    return [*lines, *_engine(plan, briefly=briefly)]


def plan_json(plan: packer.Plan) -> dict[str, Any]:
    """The plan as in its file, with its energy and the figures of the line `Prefixes`."""
    from packer.report.energy import with_energy
    from packer.report.prefixes import prefix_figures

    prefixes = prefix_figures(plan)
    return with_energy(plan) | ({} if prefixes is None else {"prefixes": prefixes})


OTHER_VERSION = re.compile(r"those of (.+), but for (?:.*\b)?version \S+(?: instead of (\S+?))?(,.*)?")


def _engine(plan: packer.Plan, *, briefly: bool) -> list[str]:
    """Assumptions about the engine: the version whose rules hold, and the prefixes that requests share."""
    from packer.report.prefixes import prefix_words
    from packer.twin.engine_rules import followed, rules_of
    from packer.twin.server import unlike_vllm

    lines = []
    for profile in dict.fromkeys(item.profile for item in plan.bins):
        settings = profile.provenance.get("settings", "")
        if (other := OTHER_VERSION.fullmatch(settings)) is not None:
            measured = f"vLLM {other[2]} ({other[1]})" if other[2] else other[1]
            text = f"Version     rules of vLLM {profile.engine.version}: scheduling, KV cache and slots are its own;"
            lines.append(f"{text} step times are those measured on {measured}")
        if said := followed(profile.engine):
            lines.append(f"Version     {said}")
        rules, unlike = rules_of(profile.engine), unlike_vllm(plan.workload, profile)
        if unlike and (rules.prefix_caching or rules.async_scheduling):
            text = f"Engine      without prefix caching and asynchronous scheduling: a server that {unlike} is not"
            lines.append(f"{text} vLLM's; vLLM {profile.engine.version} has them on by default")
    if (shared := prefix_words(plan, briefly=briefly)) is not None:
        lines.append(f"Prefixes    {shared}")
    return lines + [f"Outage      {each}" for each in outages(plan.workload, plan.bins)]


def outages(fleet: packer.Workload, bins: Sequence[packer.Bin]) -> list[str]:
    """Name the servers that vLLM may end, and what avoids it; the servers of each version together."""
    from packer.twin.engine_rules import outage

    found: dict[str, list[int]] = {}
    for k, item in enumerate(bins):
        adapters = int((fleet.ranks[list(item.adapters)] > 0).sum())
        if said := outage(item.profile.engine, item.max_loras, adapters):
            found.setdefault(said, []).append(k)
    return [f"{plural(len(few), 'server')} {spans(few)}: {said}" for said, few in found.items()]


def _tightest(plan: packer.Plan, found: AdapterFigures) -> list[str]:
    """Line about the adapter nearest to or furthest beyond its limits; empty if no adapter gets an answer."""
    import numpy as np

    if np.isnan(found.mean_ttft_ms).all():
        return []
    used = np.nan_to_num(found.slo_used, nan=-1.0, posinf=np.inf)
    most = int(np.lexsort((np.isnan(found.p95_ttft_ms), used == used.max()))[-1])
    gpus = [k for k, item in enumerate(plan.bins) if most in item.adapters]
    where = f"{plural(len(gpus), 'server')} {spans(gpus)}"
    share = f"uses {used[most]:.0%} of its limits" if used[most] < np.inf else "is on a server that starves or queues"
    ttft, itl = found.p95_ttft_ms[most], found.mean_itl_ms[most]
    got = "no answer" if np.isnan(ttft) else f"p95 TTFT {ttft:,.0f} ms, ITL {itl:.1f} ms"
    return [f"Tightest    adapter {plan.workload.names[most]!r} on {where} {share}: {got}"]


def assumed_lengths(fleet: packer.Workload) -> str:
    """Say which token lengths the workload does not give (input, output or both) and what is assumed instead."""
    sides = fleet.assumed_lengths
    means = [f"{getattr(fleet, side).mean:g}" for side in sides]
    whose = "" if fleet.assuming == len(fleet) else f"of {fleet.assuming:,} of {len(fleet):,} adapters "
    if len(sides) == 1:
        what = "prompts" if sides == ("input_tokens",) else "answers"
        return f"of {what} {whose}not given: as ShareGPT's, {means[0]} tokens on average; column {sides[0]} gives them"
    said = f"{whose}not given: as ShareGPT's, {means[0]} tokens in and {means[1]} out on average;"
    return f"{said} columns input_tokens and output_tokens give them"


def _bound(plan: packer.Plan) -> str:
    """Text of the lower bound on the objective; "" if the plan has none."""
    infeasible = plan.status.value == "infeasible"
    if plan.lower_bound is None or (infeasible and plan.lower_bound <= 1):
        return ""
    source = f" ({plan.bound_source})" if plan.bound_source else ""
    if plan.objective in ("gpus", "moves", "recommend"):
        needed = "GPU is" if plan.lower_bound == 1 else "GPUs are"
        source = "" if plan.lower_bound == 1 else source
        return f"{counted(plan.n_gpus, 'GPU')}, at least {plan.lower_bound:g} {needed} needed{source}; "
    if _priced(plan) and plan.objective_value:
        return f"{money(plan.objective_value[0])} per hour, at least {money(plan.lower_bound)}{source}; "
    return f"lower bound {plan.lower_bound:g}{source}; "
