"""Fleets at one load of their traffic: the busiest hour, a percentile, the mean."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import packer
from packer.adapter import Adapter
from packer.arrays import IntArray
from packer.arrival import Arrivals, RequestTrace
from packer.errors import IncompatibleError, ValidationError
from packer.goal import Slo
from packer.operate.observe import (
    at_load,
    drawn_within,
    log_of_plan,
    observe_log,
    observe_replayed,
    seen_in_log,
)
from packer.operate.schedule import periods_of_trace
from packer.operate.view import View
from packer.profile import Profile
from packer.traces.assign import Ranks
from packer.traces.measure import measure_workload
from packer.traces.pattern import busiest_requests, rates_of
from packer.traces.read import read_trace
from packer.traces.trace import Trace
from packer.twin.override import with_engine
from packer.workload import Workload


@pytest.fixture
def fleet() -> Workload:
    """Three hours of requests: "day" has 60, 180 and 60, "night" 0, 0 and 30, with limits and a class."""
    day = np.concatenate([np.linspace(k * 3600, (k + 1) * 3600 - 1, n) for k, n in enumerate((60, 180, 60))])
    night = np.linspace(2 * 3600, 3 * 3600 - 1, 30)
    times = np.concatenate([day, night])
    order = np.argsort(times, kind="stable")
    adapter = np.repeat([0, 1], [len(day), len(night)])[order]
    tokens = np.full(len(times), 100)
    trace = RequestTrace(times[order], adapter, tokens, tokens)
    adapters = [Adapter("day", 8, 0.1, slo_class="chat"), Adapter("night", 16, 0.1)]
    return Workload(adapters, arrivals=Arrivals("trace", trace=trace), slo=Slo.of(500.0))


@pytest.mark.parametrize(
    ("load", "requests_per_hour"), [("peak", [180, 0]), ("each-peak", [180, 30]), ("mean", [100, 10])]
)
def test_rates_are_those_of_the_hour(fleet: Workload, load: str, requests_per_hour: list[float]) -> None:
    """Rates are those of the hour that is named; adapters that are silent then stay in the fleet."""
    found = at_load(fleet, load)
    assert found.rates * 3600 == pytest.approx(requests_per_hour, rel=0.02, abs=0.01)
    assert found.arrivals.trace is None
    assert found.names == fleet.names
    assert found.slo == fleet.slo
    assert [a.slo_class for a in found.adapters] == ["chat", None]


def test_adapters_that_a_deploy_replaced_are_said() -> None:
    """A plan for the busiest hour alone knows little of adapters whose load is in other hours, but chance is none; the
    load said is that of --at each-peak, to which adapters of a single request add theirs."""
    hours = np.repeat([0.0, 3600.0], 400)
    every = np.arange(800)
    replaced = every % 2 + 2 * (hours > 0)
    for adapter, said in ((replaced, True), (every % 2, False), (np.where(every % 4 == 3, 4 + every, replaced), True)):
        names, owner = np.unique(adapter, return_inverse=True)
        tokens = np.full(800, 100)
        times = hours + np.tile(np.linspace(0, 3599, 400), 2)
        log = Trace(times, tokens, tokens, owner, tuple(map(str, names)), ranks=(8,) * len(names), source="drawn")
        notes = " ".join(observe_log(log, Ranks()).notes)
        assert ("busiest windows of 2 adapters are other ones" in notes and "for 2 × the load" in notes) == said


def test_loads_of_a_file(fleet: Workload, tmp_path: Path) -> None:
    """A file of rates gives any fleet its loads; an unknown load is refused with those that there are."""
    path = tmp_path / "loads.csv"
    path.write_text("adapter,noon,evening\nday,1.5,0.5\nnight,0,2\n", "utf-8")
    plain = fleet.with_arrivals(Arrivals())
    assert at_load(plain, "evening", path).rates.tolist() == [0.5, 2.0]
    with pytest.raises(ValidationError, match=r"among noon, evening of .*got 'peak'"):
        at_load(plain, "peak", path)
    with pytest.raises(IncompatibleError, match="--loads FILE"):
        at_load(plain, "peak")
    with pytest.raises(ValidationError, match="peak, each-peak"):
        at_load(fleet, "busy")


def test_a_log_is_replayed_as_it_was(tmp_path: Path) -> None:
    """A replayed log has its own requests; rates at another hour exclude that."""
    path = tmp_path / "log.jsonl"
    usage = '"usage": {"prompt_tokens": 100, "completion_tokens": 50}'
    lines = (f'{{"timestamp": {1_767_225_600 + k}, "model": "a", {usage}}}' for k in range(10))
    path.write_text("\n".join(lines), "utf-8")
    log = read_trace(path)
    found = observe_log(log, Ranks(others=(8,)), replay=True).fleet
    assert found.arrivals.trace is not None
    assert found.arrivals.trace.time_s.tolist() == list(range(10))


def test_an_adapter_without_requests_is_not_left_out_unsaid(tmp_path: Path) -> None:
    """A plan for a log has no server for an adapter that only the table of ranks names: that is said."""
    path = tmp_path / "log.jsonl"
    usage = '"usage": {"prompt_tokens": 100, "completion_tokens": 50}'
    path.write_text("\n".join(f'{{"timestamp": {k}, "model": "a", {usage}}}' for k in range(10)), "utf-8")
    found = observe_log(read_trace(path), Ranks({"a": 8, "idle": 16, "base": 0}))
    assert found.fleet.names == ("a",)
    assert [note for note in found.notes if "idle" in note and "base" not in note]


def test_files_of_a_log_may_be_joined(tmp_path: Path) -> None:
    """Files that begin with a header each are one log in any order; a file that was joined twice is noticed."""
    path = tmp_path / "log.csv"
    files = [
        "timestamp,model,prompt_tokens,completion_tokens\n"
        + "".join(f"{1.5 * k + 0.01 * (k * k % 7)},{'ab'[k % 2]},{9 + k},5\n" for k in range(first, first + 20))
        for first in (20, 0)
    ]
    for parts, requests, twice in ((files, 40, ""), ([*files, files[1]], 60, "20 of 60 requests")):
        path.write_text("".join(parts))
        log = read_trace(path)
        assert (len(log), log.names) == (requests, ("a", "b"))
        notes = observe_log(log, Ranks({}, (8,))).notes
        few = f"{requests} requests alone: the rate may differ by up to {1.96 / requests**0.5:.0%} by chance"
        assert [note[:17] for note in notes] == ([twice] if twice else []) + [few[:17]]
        assert notes[-1].startswith(few)


def test_times_that_are_hardly_seconds_are_asked_about(tmp_path: Path) -> None:
    """Days, as a spreadsheet counts them, would be a thousand times the load that any fleet has."""
    path = tmp_path / "log.csv"
    for requests, within in ((500, "0.0058"), (300, "0.0035")):
        rows = "".join(f"{46_083.0 + k / 86_400},a,9,5\n" for k in range(requests))
        path.write_text(f"timestamp,model,prompt_tokens,completion_tokens\n{rows}")
        note = observe_log(read_trace(path), Ranks({}, (8,))).notes[-1]
        assert note.startswith(f"{requests} requests within {within} s: are these times in seconds")


def test_the_busiest_window_of_a_log(tmp_path: Path) -> None:
    """A log that ends quietly is seen at its busiest hour, and in its last one where that is asked for."""
    path = tmp_path / "log.jsonl"
    usage = '"usage": {"prompt_tokens": 100, "completion_tokens": 50}'
    times = np.concatenate([np.arange(0, 3600, 2.0), np.arange(3600, 7200, 40.0)]) + 1_767_225_600
    path.write_text("\n".join(f'{{"timestamp": {t:.0f}, "model": "a", {usage}}}' for t in times), "utf-8")
    log = log_of_plan(path)
    assert seen_in_log(log, 3600.0, busiest=True).rates[0] == pytest.approx(0.5, rel=0.01)
    assert seen_in_log(log, 3600.0).rates[0] == pytest.approx(0.025, rel=0.3)
    hour = busiest_requests(log, rates_of(log, 3600.0))
    assert (len(hour), hour.time_s[0], hour.names) == (1800, 0.0, ("a",))
    assert hour.time_s[-1] < 3600.0


def test_the_ways_to_read_a_log_use_the_hours_of_the_day(tmp_path: Path) -> None:
    """A log from 17:30 to 19:30 has its busiest hour at 18:00, measured, replayed and evaluated alike."""
    path, start = tmp_path / "log.csv", 20_000 * 86_400 + 17 * 3600 + 1800
    times = np.concatenate([np.arange(0.0, 1800.0, 10.0), np.arange(1800.0, 7200.0, 1.0)]) + start
    rows = "".join(f"{t:.1f},a,8,100,50\n" for t in times)
    path.write_text(f"timestamp,adapter,rank,input_tokens,output_tokens\n{rows}", "utf-8")
    log = read_trace(path)
    measured = observe_log(log, Ranks({}))
    replayed = observe_replayed(measure_workload(log, replay=True))
    for found in (measured, replayed):
        assert found.fleet.rates.tolist() == pytest.approx([1.0], rel=0.01)
        assert found.planned_for.startswith("18:00 (UTC)")
    assert seen_in_log(log_of_plan(path), 3600.0, busiest=True).rates.tolist() == pytest.approx([1.0], rel=0.01)


@pytest.mark.parametrize(
    ("start_s", "view", "when"),
    [
        (0.0, View(), "30:00 after its start"),
        (20_000 * 86_400.0, View(), "2024-10-05 06:00 (UTC)"),
        (20_000 * 86_400.0, View(by_time_of_day=True), "06:00 (UTC)"),
    ],
)
def test_the_busiest_window_is_named(start_s: float, view: View, when: str) -> None:
    """The time says which of several days it is, also if the trace has no dates; the mean day has none."""
    time_s = np.concatenate([np.arange(0.0, 108_000.0, 60.0), np.arange(108_000.0, 129_600.0, 20.0)])
    tokens = np.full(len(time_s), 100)
    log = Trace(time_s, tokens, tokens, np.zeros_like(tokens), ("a",), (8,), start_s=start_s)
    found = observe_log(log, Ranks(), view, window_s=6 * 3600.0)
    assert found.planned_for.startswith(f"{when}, ")


@pytest.mark.parametrize("minutes", [-20, 36, 60])
def test_what_a_log_shows_of_its_busiest_window_is_named(minutes: int) -> None:
    """A part of an hour at either end of a log is no whole hour; hours without requests are no quiet ones."""
    hours = [np.arange(3600.0 * k, 3600.0 * (k + 1)) for k in (0, 1, 5)]
    part_s = np.arange(0.0, 60.0 * abs(minutes), 0.2)
    time_s = np.concatenate([*hours, 21_600.0 + part_s] if minutes < 0 else [part_s - part_s[-1], *hours])
    tokens, start_s = np.full(len(time_s), 100), 20_000 * 86_400.0 + time_s[0]
    log = Trace(time_s - time_s[0], tokens, tokens, np.zeros_like(tokens), ("a",), (8,), start_s=start_s)
    found = observe_log(log, Ranks())
    assert found.table.busiest_s[1] == pytest.approx(60.0 * abs(minutes), abs=2.0)
    assert found.span.endswith(" h, of which 3 h have no requests")
    assert (f", of which the log shows {abs(minutes)} min, " in found.planned_for) == (minutes != 60)


@pytest.mark.parametrize("busier", [1.0, 5.0])
def test_a_surge_at_the_end_is_left_out_with_a_note(busier: float) -> None:
    """Four minutes with five times the load are not planned for, measured or replayed, and that is said."""
    time_s = np.append(np.arange(0.0, 7200.0), np.arange(7200.0, 7440.0, 1.0 / busier))
    tokens = np.full(len(time_s), 100)
    log = Trace(time_s, tokens, tokens, np.zeros_like(tokens), ("a",), (8,), start_s=20_000 * 86_400.0)
    for found in (observe_log(log, Ranks()), observe_replayed(measure_workload(log, replay=True))):
        assert found.fleet.rate == pytest.approx(1.0, rel=0.01)
        said = [each for each in found.notes if each.startswith("the 4 min from 02:00 (UTC) at an end of the log have")]
        assert len(said) == (busier > 1.0)
        assert all("have 5 × the load of its busiest window and are left out" in each for each in said)


@pytest.mark.parametrize(("minutes", "when"), [(90, "the busiest"), (119, "the only whole")])
def test_the_hour_of_a_log_between_two_hours_is_named(minutes: int, when: str) -> None:
    """A log that has no whole hour by the clock is planned for its busiest one, and the time says so."""
    begin_s = 20_000 * 86_400.0 + (1200.0 if minutes == 90 else 30.0)
    time_s = np.arange(0.0, 60.0 * minutes, 1.0)
    tokens = np.full(len(time_s), 100)
    log = Trace(time_s, tokens, tokens, np.zeros_like(tokens), ("a",), (8,), start_s=begin_s)
    found = observe_log(replace(log, time_s=log.time_s * (minutes - 10) / minutes), Ranks())
    assert found.planned_for.endswith(f" (UTC), {when} window in it")


def test_what_a_trace_does_not_show_stays(fleet: Workload) -> None:
    """Base models, priorities and limits of a replayed fleet are kept at every load."""
    adapters = tuple(replace(a, model=f"m{k % 2}", priority=k, slo_class="chat") for k, a in enumerate(fleet.adapters))
    kept = replace(fleet, adapters=adapters)
    for found in (observe_replayed(kept).fleet, at_load(kept, "mean"), drawn_within(kept, 3600.0)):
        names = {each.name: each for each in adapters}
        assert [(a.model, a.priority, a.slo_class) for a in found.adapters] == [
            (names[a.name].model, names[a.name].priority, "chat") for a in found.adapters
        ]


def test_rates_follow_the_trend_of_their_window() -> None:
    """A fleet with the rates of one window follows how its load rises, which is said; a fleet with the mean rates of
    the log does not, and neither does one that replays its requests."""
    rng = np.random.default_rng(0)
    time_s = np.sort(np.append(3600.0 * np.sqrt(rng.random(6_000)), 3600.0 + 3600.0 * rng.random(1_000)))
    ones = np.ones(len(time_s), dtype=np.int64)
    log = Trace(time_s - time_s[0], 200 * ones, 100 * ones, 0 * ones, ("a",), start_s=float(time_s[0]))
    found = observe_log(log, Ranks(others=(8,)))
    assert found.fleet.arrivals.whole_s(3600.0) == 3600.0  # though the log begins later than its window
    assert found.fleet.arrivals.factors == pytest.approx(np.linspace(0.1, 1.9, 12), abs=0.15)
    assert found.fleet.rate == pytest.approx(6_000 / 3600, rel=0.03)
    assert any(note.startswith("in that time the load goes from") for note in found.notes)
    others = [observe_log(log, Ranks(others=(8,)), View("mean")), observe_log(log, Ranks(others=(8,)), replay=True)]
    assert [each.fleet.arrivals.factors for each in others] == [(), ()]
    replayed = observe_replayed(measure_workload(replace(log, ranks=(8,)), replay=True))
    assert [note[:30] for note in replayed.notes] == ["in that time the load goes fro"]
    assert replayed.fleet.arrivals == found.fleet.arrivals
    busiest, last = (seen_in_log(replace(log, ranks=(8,)), 3600.0, busiest=each) for each in (True, False))
    assert (busiest.arrivals, last.arrivals.factors) == (found.fleet.arrivals, ())


def test_the_last_window_of_a_long_log_needs_no_table_of_all_windows() -> None:
    """A log that grows is compared with a plan by its last seconds, however many windows it has."""
    ones = np.ones(3, dtype=np.int64)
    log = Trace(np.array([0.0, 2e6 - 0.5, 2e6]), ones, ones, 0 * ones, ("a",), (8,))
    assert seen_in_log(log, 1.0).rates.tolist() == [2.0]


def test_a_log_shorter_than_its_window_has_the_trend_of_all_of_it() -> None:
    """A log of 45 minutes about the full hour is one window, whether times of day count or not."""
    time_s = 600.0 * 60.0 + 2700.0 * np.sqrt((np.arange(3_000) + 0.5) / 3_000)
    ones = np.ones(len(time_s), dtype=np.int64)
    log = Trace(time_s - time_s[0], 200 * ones, 100 * ones, 0 * ones, ("a",), (8,), start_s=2400.0 + float(time_s[0]))
    found = [observe_log(log, Ranks(), View(by_time_of_day=each)).fleet.arrivals for each in (False, True)]
    assert found[0].factors == pytest.approx(np.linspace(0.1, 1.9, 12), abs=0.15)
    assert found[0] == found[1]
    assert list(periods_of_trace(log, Workload([Adapter("a", 8, 1.0)]), 3600.0)[1].values()) == [found[0].trend]


@pytest.mark.parametrize("sessions", [None, np.arange(3000) % 1500])
def test_replayed_prompts_begin_alike_as_drawn_ones_do(server: Profile, sessions: IntArray | None) -> None:
    """The requests of a log that counts cached tokens find about as many of them when they are replayed as drawn ones
    do: without, a plan for the log took more GPUs than one for its fleet."""
    draw = np.random.default_rng(3)
    times, adapter = np.sort(draw.uniform(0.0, 1800.0, 3000)), draw.integers(0, 6, 3000)
    adapter = adapter if sessions is None else adapter[sessions]
    inputs, outputs = draw.integers(1100, 1300, 3000), draw.integers(50, 150, 3000)
    if sessions is not None:
        inputs[1500:] += inputs[:1500] + outputs[:1500]
    cached, names = np.full(3000, 1008), tuple(f"a{k}" for k in range(6))
    log = Trace(times, inputs, outputs, adapter, names, cached_tokens=cached, sessions=sessions)
    found = observe_log(log, Ranks(others=(8,)), window_s=1800.0)
    assert found.hour is not None
    today = with_engine(server, vllm_version="0.30")
    whole = observe_log(log, Ranks(others=(8,)), window_s=1800.0, replay=True).fleet
    drawn, *replayed = (
        packer.simulate(each, today, max_loras=6, duration_s=1800.0, seed=1).prefix_hit_rate
        for each in (found.fleet, found.fleet.replaying(found.hour), whole)
    )
    assert drawn > 0.5
    assert replayed == pytest.approx([drawn, drawn], abs=0.1)
