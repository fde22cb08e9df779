"""`packer schedule`: which servers run in each hour of a day."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import packer
from packer.cli.cluster import refuse_without
from packer.cli.declare import bundle, command, flag, option, pairs, values
from packer.cli.kinds import KindArguments
from packer.cli.options import FleetFile, Writing, common
from packer.cli.output import Table, json_text
from packer.cli.plan_table import default_words
from packer.errors import IncompatibleError
from packer.io.files import write_all
from packer.times import DAY_S, HOUR_S
from packer.words import counted, money, number

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from packer.operate.day import Period, Schedule


Trends = dict[str, tuple[float, ...]]


@bundle
class DayOptions:
    """Rates and periods of the day.

    rates_path: Rates of each adapter by period, in order: adapter,<period>,<period>,… in req/s.
    trace_path: Requests of the fleet's adapters, from which the rates are measured.
    period_s: Length of a period. [default: of columns HH:MM the time between them, else an hour]
    startup_s: From the start of a server until it serves. [default: the profile's]
    """

    rates_path: str | None = option("--rates", metavar="FILE.csv")
    trace_path: str | None = option("--trace", metavar="TRACE")
    period_s: float | None = option("--period", type=click.FloatRange(min=60.0), metavar="SECONDS")
    startup_s: float | None = option("--startup", type=click.FloatRange(min=0.0), metavar="SECONDS")
    margin: float | None = common("margin")
    max_replicas: int | None = common(
        "max-replicas",
        help="Split an adapter that is too hot for one GPU in a period over up to so many.  [default: as many as it "
        "needs]",
    )
    slo: tuple[str, ...] = common("slo")
    seed: int = common("seed")

    def periods(self, fleet: packer.Workload, out: Writing) -> tuple[dict[str, npt.NDArray[np.float64]], Trends, float]:
        """Rates of the adapters in each period, req/s, the trends inside the periods, and the length of a period, s; if
        it is neither given nor known from the columns' names, a message says the default."""
        from packer.objectives.headroom import read_rates
        from packer.operate.observe import replayed_trace
        from packer.operate.schedule import periods_of_trace, trends_of_rates
        from packer.traces.pattern import spacing_s
        from packer.traces.read import read_trace

        replays = fleet.arrivals.trace is not None
        if replays + (self.rates_path is not None) + (self.trace_path is not None) != 1:
            if replays:
                raise IncompatibleError("The fleet's file has the requests: expected neither --rates nor --trace.")
            raise IncompatibleError("Expected either --rates or --trace.")
        if self.rates_path is not None:
            rates = read_rates(self.rates_path, fleet)
            if (period_s := self.period_s or spacing_s(list(rates))) is None:
                out.note(f"each column of {self.rates_path} is taken as a period of 1 h: --period SECONDS")
            period_s = period_s or HOUR_S
            return rates, trends_of_rates(fleet, rates, period_s), period_s
        trace = replayed_trace(fleet) if self.trace_path is None else read_trace(self.trace_path)
        for text in () if self.trace_path is None else trace.notes:
            out.note(text)
        period_s = self.period_s or HOUR_S
        return *periods_of_trace(trace, fleet, period_s), period_s


_TABLE = re.compile(r"\d{4,}-(routing\.json|nginx\.conf|envoy\.yaml|litellm\.yaml)", re.ASCII)
PARTS = ("static", "servers", "keda", "routes")


@bundle
class Results:
    """Output files of the schedule, and its simulation.

    output: The schedule as JSON.
    files: Write a part: static (a plan that holds all day), servers (every server of the day, for packer export), keda
        (cron triggers of KEDA), routes (a folder with the routing tables of each period). --static plan.json is the
        same; repeatable.
    names: A name in these files: prefix (of the servers' names, gpu), address (where routers find a server,
        {name}:8000), timezone (of the cron triggers, UTC). --timezone UTC is the same; repeatable.
    replay: Simulate a day of requests on the schedule and on the static plan.
    """

    output: str | None = common("output")
    files: dict[str, str] = pairs("--write", names=dict.fromkeys(PARTS, str), metavar="NAME=FILE")
    names: dict[str, str] = pairs("--name", names=dict.fromkeys(("prefix", "address", "timezone"), str))
    replay: bool = flag()


@command
def schedule(file: FleetFile, servers: KindArguments, hours: DayOptions, results: Results, out: Writing) -> int:
    """Which servers run in each hour of a day, from one plan that holds all day.

    The static plan holds in every period. Each period runs as few servers as hold there; adapters of servers that are
    off are on others meanwhile. The output says what the static plan alone would take.

    \b
    Examples:
      packer schedule fleet.csv --rates day.csv
      packer schedule fleet.csv --trace week.csv.gz --period 1800
      packer schedule fleet.csv --rates day.csv --replay --servers servers.json --keda keda.yaml -o schedule.json
    """
    from packer.export.formats import export_plan
    from packer.export.keda import check_day, scaled_objects
    from packer.export.servers import Options, address_of
    from packer.io.plans import plan_text

    static_path, servers_path, keda_path, routes_path = map(results.files.get, PARTS)
    refuse_without("--keda", () if keda_path else ("timezone",))
    refuse_without("--rates: the periods of a trace are in UTC", () if hours.rates_path else ("timezone",))
    refuse_without("--routes", () if routes_path else ("address",))
    refuse_without("--keda or --routes", () if keda_path or routes_path else ("prefix",))
    files = (static_path, servers_path, keda_path, results.output)
    out.check(*files)
    former = set[str]() if routes_path is None else _former(routes_path)
    if routes_path is not None:
        out.check(_first_made(Path(routes_path, "0000-routing.json")), *sorted(former))
    prefix, timezone = results.names.get("prefix", "gpu"), results.names.get("timezone", "UTC")
    where = Options(prefix=prefix, address=results.names.get("address"))
    address_of(0, where)
    fleet = file.fleet().held_to(hours.slo)
    kinds = servers.kinds(int(fleet.ranks.max()))
    out.note_profiles(*(kind.profile for kind in kinds))
    rates, trends, period_s = hours.periods(fleet, out)
    day_s = len(rates) * period_s
    if keda_path is not None:
        check_day(day_s, timezone)
    given = values(hours, "rates_path", "trace_path") | {"slo": fleet.slo, "period_s": period_s, "trends": trends}
    with out.progress() as progress:
        found = packer.schedule(fleet, kinds, rates, **given, progress=progress)
    data = found.to_dict()
    if results.replay:
        data["replay"] = _replayed(found, rates, period_s, trends, hours.seed)
    texts = {} if results.output is None else {results.output: json_text(data) + "\n"}
    if static_path is not None:
        texts[static_path] = plan_text(found.static)
    if servers_path is not None:
        texts[servers_path] = plan_text(found.deployed)
    if keda_path is not None:
        names = {f"{prefix}-{k}": found.running(k) for k in range(len(found.servers))}
        times: dict[str, Any] = {"day_s": day_s, "startup_s": found.startup_s}
        texts[keda_path] = scaled_objects(names, **times, timezone=timezone)
    if routes_path is not None:
        for each in found.periods:
            begin_s = each.start_s % DAY_S if day_s <= DAY_S else each.start_s
            begin = f"{int(begin_s // 3600):02d}{int(begin_s // 60) % 60:02d}"
            for name, text in export_plan(each.plan, "routing", where, numbers=each.servers).items():
                texts[os.path.join(routes_path, f"{begin}-{name}")] = text
    write_all(texts, force=out.force)
    for path in sorted(former - texts.keys()):
        os.unlink(path)
        out.note(f"removed {path}, of a former schedule")
    by_default = not (servers.profile_names or servers.gpu_names)
    out.result(data, lambda: _lines(found, data, fleet.slo, by_default=by_default))
    for path in filter(None, (*files, routes_path)):
        out.note(f"wrote {path}")
    return 0


def _former(folder: str) -> set[str]:
    """The routing tables of a former schedule in a folder."""
    there = os.listdir(folder) if os.path.isdir(folder) else ()
    return {os.path.join(folder, each) for each in there if _TABLE.fullmatch(each)}


def _first_made(path: Path) -> str:
    """The path, or the first of its folders that is missing, which is made after the work."""
    return str(path) if os.path.exists(path.parent) else _first_made(path.parent)


def _replayed(found: Schedule, rates: Any, period_s: float, trends: Trends, seed: int) -> dict[str, Any]:
    from packer.operate.replay import Window, replay, requests_of_day, windows_of

    fleet = found.static.workload
    trace = requests_of_day(fleet, rates, period_s, trends=trends, seed=seed)
    given: dict[str, Any] = {"seed": seed}
    static = [Window(0.0, len(rates) * period_s, found.static.cluster())]
    served = replay(fleet, trace, windows_of(found), startup_s=found.startup_s, moves=found.moves, **given)
    return {"schedule": served.to_dict(), "static": replay(fleet, trace, static, **given).to_dict()}


def _lines(found: Schedule, data: dict[str, Any], slo: packer.Goal, *, by_default: bool) -> list[Table | str]:
    """The schedule as text and tables. `by_default`: the profile is the default."""
    from packer.solvers.candidates import ignored_words

    rows = [(_when(each), each.gpus, ", ".join(map(str, each.servers)), len(each.moved)) for each in found.periods]
    several = len({item.profile for item in found.servers}) > 1
    servers = []
    for k, item in enumerate(found.servers):
        hours = sum(end_s - start_s for start_s, end_s in found.running(k)) / 3600
        kind = [item.profile.name] if several else []
        servers.append((k, *kind, item.max_loras, item.max_lora_rank, len(item.adapters), round(hours, 1)))
    columns = ("server", *(["profile"] if several else []), "max_loras", "max_lora_rank", "adapters")
    fewest, most = min(each.gpus for each in found.periods), found.static.n_gpus
    always = "it runs all the time" if most == 1 else "all of them run all the time"
    run = always if fewest == most else f"the quietest takes {fewest}"
    hours = (found.periods[-1].end_s - found.periods[0].start_s) / 3600.0
    span = "a day" if hours == 24.0 else f"in {hours:.3g} h"
    takes = f"{number(found.gpu_hours, 1)} GPU-hours{_price(found.price)} {span}"
    if len(found.periods) == 1 and found.gpu_hours == found.static_gpu_hours:
        total = f"{takes} on the static plan: fewer servers in quiet periods save nothing, starts and moves counted."
    else:
        total = (
            f"{takes} with {counted(len(found.starts()), 'start')} and {counted(found.moves, 'move')}, "
            f"at most {counted(found.most_gpus, 'GPU')} at once; the static plan of {counted(most, 'GPU')} "
            f"takes {number(found.static_gpu_hours, 1)}{_price(found.static_price)}, {100.0 * found.regret:.0f} % more."
        )
    lines: list[Table | str] = [
        f"{found.static.decision.removesuffix('.')}; {run}.",
        *([default_words(found.static)] if by_default else []),
        Table("Schedule", ("periods", "GPUs", "servers", "adapters moved"), rows),
        Table("Servers", (*columns, f"hours {span}"), servers, left=(0, 1) if several else (0,)),
        total,
        f"The goal: {slo}.",
        *(f"{each}." for each in ignored_words(found.static.workload, [item.profile for item in found.servers])),
    ]
    for name, row in data.get("replay", {}).items():
        p95 = "not all served" if row["p95_ttft_ms"] is None else f"{row['p95_ttft_ms'] / 1000:.2f} s"
        said = f"Replayed, {name}: {row['requests']:,} requests, TTFT p95 {p95},"
        lines.append(f"{said} {100.0 * row['within_slo']:.1f} % within their limits.")
    return lines


def _when(each: Period) -> str:
    """A period by the times of day at which it begins and ends, if such a time names it; else by its names."""
    from packer.traces.pattern import clock

    begin, end = clock(each.start_s), clock(each.end_s)
    if each.names[0] == begin:
        return f"{begin}–{'24:00' if end == '00:00' else end}"
    return " … ".join(dict.fromkeys((each.names[0], each.names[-1])))


def _price(price: float | None) -> str:
    """A price in parentheses; "" if it is not known."""
    return "" if price is None else f" ({money(price)})"
