"""The HTML report of a plan, a self-contained page: evaluate growing rates, read a comparison, write the page."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from packer import words
from packer.errors import FileFormatError, reader, shown
from packer.evaluation import Evaluations
from packer.io.documents import parse_json
from packer.io.files import read_text, write_text
from packer.plan import Plan
from packer.progress import Progress, silent
from packer.report import context
from packer.report.growth import Evaluate, GrowthCurves, growth_of
from packer.report.pictures import COLUMNS, frontier_charts
from packer.report.templates import read, render
from packer.room import room_rows
from packer.solvers.evaluator import Evaluator
from packer.twin.hours import Hours, with_adapters
from packer.twin.per_adapter import quiet_adapters
from packer.workload import Workload

_WORDS = (words.visible, words.plural, words.counted, words.number, words.by_rank)
_FIGURES = (context.milliseconds, context.slowest, context.percent, context.by_load, context.memory_bars)
_HELPERS: dict[str, Any] = {each.__name__: each for each in (repr, *_WORDS, *_FIGURES)}  # Functions of the page.
_ALWAYS = ("solver", "outcome", "gpus", "runtime_s")


def render_report(
    plan: Plan, *, growth: GrowthCurves | None = None, comparison: Sequence[Mapping[str, object]] = ()
) -> str:
    """The page; the same input gives the same bytes. Sections without `growth` or `comparison` are left out."""
    script = read("report.js")
    keys = list(comparison[0]) if comparison else []
    known = [key for key in COLUMNS if key in keys]
    varied = [key for key in known if key in _ALWAYS or len({str(row[key]) for row in comparison}) > 1]
    shown = varied if known else keys
    fleet, servers = plan.workload, list(zip(plan.bins, plan.evaluations, strict=True))
    digest = hashlib.sha256(script.encode()).digest()
    return render(
        "report.html", **_HELPERS, plan=plan, growth=growth, servers=servers,
        frontier=frontier_charts(plan.frontier, plan.n_gpus, fleet.slo.limits) if len(plan.frontier) > 1 else [],
        title=words.visible(fleet.name), few=quiet_adapters(fleet), limits=str(fleet.slo),
        kept=context.in_limits(plan), resimulated=context.resimulated(plan), starts=context.starts(plan),
        decision=plan.decision, headroom=plan.headroom_words, rooms=room_rows(plan.rooms),
        reasons=[words.visible(reason) for reason in (*plan.reasons, *context.queueing(plan))],
        unplaced=[words.visible(fleet.names[i]) for i in plan.unplaced],
        requests_s=fleet.arrivals.mean_factor * sum(item.requests_s(fleet) for item in plan.bins),
        most=max((row.offered_tok_s for row in plan.evaluations), default=0.0) or 1.0,
        columns=[COLUMNS.get(key, words.visible(key)) for key in shown],
        comparison=[[_cell(row[key]) for key in shown] for row in comparison],
        profiles=list(dict.fromkeys(item.profile for item in plan.bins)),
        script=Markup(script), script_hash=base64.b64encode(digest).decode(),
    )  # fmt: skip


def _cell(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return words.visible(f"{value:,}" if isinstance(value, int) else str(value))


DEFAULT_CURVES = 6
MOST_GPUS = 256
"""Plans of more GPUs show latencies of adapters only if the plan has them: simulating an hour of a server takes up to a
tenth of a second."""


def write_report(
    plan: Plan, path: str | os.PathLike[str], *, predictor: str | None = None, curves: int = DEFAULT_CURVES,
    comparison: Sequence[Mapping[str, object]] = (), seed: int | None = None, force: bool = True,
    progress: Progress = silent,
) -> GrowthCurves | None:  # fmt: skip
    """Write the page atomically, and return the growth curves that it shows.

    Latencies of adapters come from a simulated hour.

    `predictor`, `seed`: the predictor of the growing rates, and its seed; None: those of the plan. Then growth is
    simulated in the hours that gave the plan its figures, if they did.
    `curves`: number of servers for which growth is drawn (`packer.report.growth.choose_gpus`); 0 for none.
    `comparison`: rows of `packer compare --json` (`read_comparison`).
    """
    growth = None
    if curves and plan.bins:
        name = predictor or plan.predictor
        evaluate = _growing(plan, name, plan.seed if seed is None else seed)
        growth = growth_of(plan, evaluate, predictor=name, limit=curves, progress=progress)
    progress("latencies of adapters", 0, 0)
    shown = with_adapters(plan) if plan.n_gpus <= MOST_GPUS else plan
    write_text(path, render_report(shown, growth=growth, comparison=comparison), force=force)
    return growth


def _growing(plan: Plan, predictor: str, seed: int) -> Evaluate:
    """Evaluates servers at growing rates, by what gave the plan its figures if `predictor` is the plan's predictor."""
    profiles = list(dict.fromkeys(item.profile for item in plan.bins))
    evaluator = Evaluator.load(predictor, profiles, seed=seed)
    twins = all(evaluator.twin_of(profile) is not None for profile in profiles)
    if predictor != plan.predictor or not twins:
        return evaluator.report
    if plan.rooms:
        hours = Hours(seed, limits=plan.limits)
        return lambda fleet, bins: Evaluations.of([hour.figures for hour in hours.all(bins, fleet)])
    return Evaluator.load("twin", profiles, seed=seed).report if plan.limits else evaluator.report


@reader
def read_comparison(path: str | os.PathLike[str], fleet: Workload | None = None) -> Sequence[Mapping[str, object]]:
    """Read rows of a comparison: a JSON list of flat objects with the same keys, or such a list under `rows`. `fleet`:
    what must have been compared, by the name and the numbers of adapters that the file has."""
    data = parse_json(read_text(path))
    rows = data.get("rows") if isinstance(data, dict) else data
    if (
        not isinstance(rows, list)
        or not all(isinstance(row, dict) for row in rows)
        or any(row.keys() != rows[0].keys() for row in rows)
    ):
        raise FileFormatError(f"expected a list of rows with the same keys, got {shown(data)}.")
    for number, row in enumerate(rows, start=1):
        for key, value in row.items():
            if not isinstance(value, str | int | float | None):
                rule = "expected text, a number, true, false or null in each cell,"
                raise FileFormatError(f"{rule} got {shown(value)} as {shown(key)} of entry {number}.")
    if fleet is not None:
        name = data.get("workload", fleet.name) if isinstance(data, dict) else fleet.name
        sizes = list(dict.fromkeys(row["adapters"] for row in rows if "adapters" in row))
        if name != fleet.name or (sizes and len(fleet) not in sizes):
            found = f"{shown(name)} of {words.listed(sizes)}" if sizes else shown(name)
            rule = "expected a comparison on the plan's workload,"
            raise FileFormatError(f"{rule} {shown(fleet.name)} of {words.counted(len(fleet), 'adapter')}, got {found}.")
    return rows
