"""A plan shown again, its adapters, and what changes to another plan."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from packer import Adapter, load_plan, load_profile, solve
from packer.bin import Bin
from packer.cli import run
from packer.cli.evaluated import conclusion_lines
from packer.cli.output import Table
from packer.cli.plan_table import plan_lines
from packer.evaluation import Evaluations
from packer.operate.evaluate import evaluate_plan
from packer.plan import Moves, Plan, Status
from packer.planning.verify import verified
from packer.predictors.twin import TwinPredictor
from packer.profile import Profile
from packer.room import Room
from packer.speculation import SpeculationSpec
from packer.twin.hours import Hours, merged
from packer.workload import Workload


@pytest.fixture
def plans(tmp_path: Path) -> tuple[str, str]:
    """A plan of six adapters on one server, and one of seven on two, of which one goes on with other slots."""
    profile = load_profile("h100-64gb/llama-3.1-8b-instruct")
    fleet = Workload([Adapter(f"a{i}", 8, 0.2) for i in range(6)], name="fleet")
    old = solve(fleet, profile, max_gpus=1)
    later = Workload([*(Adapter(f"a{i}", 8, 0.2) for i in range(1, 6)), Adapter("b", 16, 0.3), Adapter("c", 8, 0.1)])
    bins = (
        Bin((0, 1, 2), profile.settings(3, 8), profile),
        Bin((3, 4, 5, 6), profile.settings(4, 16), profile),
    )
    figures = TwinPredictor(seed=0).evaluate(later, bins)
    new = verified(replace(old, workload=later, bins=bins, evaluations=figures, rooms=(), adapters=None, headroom=()))
    paths = str(tmp_path / "plan.json"), str(tmp_path / "next.json")
    old.save(paths[0])
    new.save(paths[1])
    return paths


def shown(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    """What the command says as JSON."""
    assert run(["show", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_tables_of_solve_again(plans: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """The plan's own file as JSON, with the energy and prefixes that the text names; the tables of `packer solve` for
    people."""
    found, saved = shown([plans[0]], capsys), json.loads(Path(plans[0]).read_text("utf-8"))
    assert found == saved | {key: found[key] for key in ("energy", "prefixes")}
    assert run(["show", plans[0]]) == 0
    text = capsys.readouterr().out
    assert "Plan for 'fleet': 6 adapters, 1 GPU" in text
    assert "Found by" in text


def test_an_adapter_and_what_it_gets(plans: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """Its server and figures are those of the plan; an unknown adapter is named."""
    plan = load_plan(plans[0])
    assert plan.adapters is not None
    (row,) = shown([plans[0], "--adapter", "a3"], capsys)["adapters"]
    assert row["servers"] == {"0": 1.0}
    assert row["p95_ttft_ms"] == pytest.approx(plan.adapters.p95_ttft_ms[3])
    assert run(["show", plans[0], "--adapter", "a3", "--adapter", "a5"]) == 0
    assert "a5" in capsys.readouterr().out
    assert run(["show", plans[0], "--adapter", "a33"]) == 2
    assert "Unknown adapter 'a33'. Did you mean 'a3'?" in capsys.readouterr().err
    assert run(["show", plans[0], "--adapter", "a3", "--diff", plans[1]]) == 2


def test_an_idle_adapter_has_a_server_and_no_latency(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An adapter with a rate of 0 is placed; nothing is said of requests that it does not send."""
    fleet = tmp_path / "fleet.csv"
    fleet.write_text("adapter,rank,rate\nbusy,8,2\nidle,16,0\n")
    assert run(["solve", str(fleet), "-o", str(tmp_path / "plan.json"), "--quiet"]) == 0
    (row,) = shown([str(tmp_path / "plan.json"), "--adapter", "idle"], capsys)["adapters"]
    assert row["servers"] == {"0": 1.0}
    assert (row["rate"], row["mean_ttft_ms"], row["p95_ttft_ms"]) == (0.0, None, None)


def test_what_changes_to_another_plan(plans: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """Servers are matched by their adapters: what moves, comes, goes and restarts, by name."""
    found = shown([plans[0], "--diff", plans[1]], capsys)
    assert found["gpus"] == [1, 2]
    assert found["continues"] == [0, None]
    assert [each["adapter"] for each in found["moved"]] == ["a4", "a5"]
    assert found["moved"][0] == {"adapter": "a4", "from": [0], "to": [1]}
    assert [each["server"] for each in found["restarted"]] == [0]
    assert (found["new"], found["gone"]) == (["b", "c"], ["a0"])
    back = shown([plans[1], "--diff", plans[0]], capsys)
    assert back["gpus"] == [2, 1]
    assert back["gone"] == ["b", "c"]
    assert run(["show", plans[0], "--diff", plans[1]]) == 0
    text = capsys.readouterr().out
    assert "Changes     2 adapters moved, 2 new, 1 gone; servers: 1 stay, 1 start, 0 stop" in text
    assert "Restart     server 0: max_loras × rank 6 × 8 → 3 × 8" in text
    assert "Adapters that move" in text
    assert "1 (new)" in text
    same = shown([plans[0], "--diff", plans[0]], capsys)
    assert (same["moved"], same["new"], same["gone"], same["restarted"]) == ([], [], [], [])


def test_shares_and_adapters_without_a_server_are_changes(
    plans: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Routes change where an adapter gets other shares, leaves one of its servers, or has none left: each is said."""
    old, path = load_plan(plans[1]), str(tmp_path / "shares.json")
    first, second = old.bins

    def on_both(share: float) -> Plan:
        """The plan with a share of the requests of adapter a1 on its server, and the rest on the other one."""
        own = replace(first, shares=(share, *first.shares[1:]))
        other = replace(second, adapters=(0, *second.adapters), shares=(1.0 - share, *second.shares))
        return verified(replace(old, bins=(own, other)))

    on_both(0.5).save(plans[0])
    on_both(0.75).save(path)
    found = shown([plans[0], "--diff", path], capsys)
    assert (found["moved"], found["without_server"]) == ([], [])
    assert found["shares"] == [{"adapter": "a1", "from": {"0": 0.5, "1": 0.5}, "to": {"0": 0.75, "1": 0.25}}]
    assert [each["adapter"] for each in shown([plans[0], "--diff", plans[1]], capsys)["shares"]] == ["a1"]
    assert run(["show", plans[0], "--diff", path]) == 0
    assert "Shares      1 adapter with other shares by server: a1" in capsys.readouterr().out
    evaluate_plan(old, lose=[1]).plan.save(path)  # the other server has slots of rank 8
    assert shown([plans[1], "--diff", path], capsys)["without_server"] == ["b"]
    assert run(["show", path]) == 0
    assert "No server   1 adapter: b" in capsys.readouterr().out


def test_a_part_of_the_moves_says_so(
    plans: tuple[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table of adapters that move has a few of them; its title says how many there are, and nothing if all are."""
    for most, title in ((2, "Adapters that move\n"), (1, "Adapters that move, the first 1 of 2\n")):
        monkeypatch.setattr("packer.cli.show.MOST_MOVES", most)
        assert run(["show", plans[0], "--diff", plans[1]]) == 0
        assert title in capsys.readouterr().out


def test_servers_that_are_not_shown_may_have_as_much_headroom(toy_plan: Callable[..., Plan]) -> None:
    """Servers beyond the first eight have the headroom of the last one shown, or more: not more for certain."""
    rooms = tuple(Room(1.1664, "slots", f"{k} of 9 in use", "") for k in range(9))
    plan = replace(toy_plan([f"a{k}" for k in range(9)], gpus=9), rooms=rooms)
    (table,) = (part for part in plan_lines(plan) if isinstance(part, Table) and part.title == "Headroom")
    assert table.caption == "Not shown: 1 server with as much headroom or more."


def test_a_server_with_another_number_is_shown_with_both(
    plans: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the first server stops, a move to the second one, now the first, has its new number and its old one, and a
    line says that exported files use the new one; JSON has the new number alone."""
    old, path = load_plan(plans[1]), str(tmp_path / "less.json")
    fleet, item = old.workload.subset((0, 3, 4, 5, 6)), old.bins[1]
    bins = (Bin((0, 1, 2, 3, 4), item.settings, item.profile),)
    figures = TwinPredictor(seed=0).evaluate(fleet, bins)
    less = replace(old, workload=fleet, bins=bins, evaluations=figures, rooms=(), adapters=None, headroom=())
    verified(less).save(path)
    found = shown([plans[1], "--diff", path], capsys)
    assert (found["continues"], found["moved"]) == ([1], [{"adapter": "a1", "from": [0], "to": [0]}])
    assert run(["show", plans[1], "--diff", path]) == 0
    text = capsys.readouterr().out
    assert "servers: 1 stay, 0 start, 1 stop" in text
    assert "Renumbered  1 → 0: exported files name servers by the new numbers" in text
    assert "0 (was 1)" in text


def test_the_tightest_adapter_is_one_that_starves(
    server: Profile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An adapter of a starving server is the tightest, in a plan from a file as in a new one."""
    fleet = Workload([Adapter("quiet", 8, 0.1), Adapter("hot", 8, 300.0)])
    bins = tuple(Bin((k,), server.settings(1, 8), server) for k in range(2))
    hours = Hours().all(bins, fleet)
    rows, figures = Evaluations.of([hour.figures for hour in hours]), merged(fleet, bins, hours)
    plan = Plan(fleet, bins, rows, Status.INFEASIBLE, "gpus", "hand", "twin", adapters=figures)
    plan.save(tmp_path / "plan.json")
    assert run(["show", str(tmp_path / "plan.json")]) == 0
    said = "Tightest    adapter 'hot' on server 1 is on a server that starves or queues"
    assert said in capsys.readouterr().out
    assert said in "\n".join(map(str, plan_lines(plan)))


def test_an_adapter_without_an_answer_is_named_and_has_no_figure(
    server: Profile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a server that starves, the tightest adapter is one that gets no answer, before those that wait; its p95 and
    the worst adapter's are null in the plan's file, and its share of the limits stays infinite."""
    fleet = Workload([Adapter("waits", 8, 150.0), Adapter("shut-out", 8, 50.0)])
    item = Bin((0, 1), server.settings(1, 8), server)
    hours = Hours().all((item,), fleet)
    rows, figures = Evaluations.of([hour.figures for hour in hours]), merged(fleet, (item,), hours)
    plan = Plan(fleet, (item,), rows, Status.INFEASIBLE, "gpus", "hand", "twin", adapters=figures)
    path = str(tmp_path / "plan.json")
    plan.save(path)
    found = shown([path], capsys)
    assert [value is None for value in found["adapters"]["p95_ttft_ms"]] == [False, True]
    assert found["gpus"][0]["evaluation"]["worst_adapter_ttft_ms"] is None
    assert load_plan(path).evaluations.slo_used.tolist() == rows.slo_used.tolist() == [float("inf")]
    assert run(["show", path]) == 0
    said = "Tightest    adapter 'shut-out' on server 0 is on a server that starves or queues: no answer"
    assert said in capsys.readouterr().out


def test_nothing_is_shown_of_adapters_without_a_request(
    server: Profile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Adapters that are idle, or hardly used, have dashes instead of latencies of 0 and limits of which 0 % is used."""
    fleet = Workload([Adapter("idle", 8, 0.0), Adapter("rare", 8, 2e-6)], name="fleet")
    path = str(tmp_path / "plan.json")
    solve(fleet, server, max_gpus=1).save(path)
    assert run(["show", path]) == 0
    cells = next(line.split() for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["0"])
    assert len(cells) > 8
    assert cells[6:-2] == ["–"] * len(cells[6:-2])
    assert run(["show", path, "--adapter", "idle", "--adapter", "rare"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    dashes = ["–"] * 5
    assert ["idle", "8", "0", "0", *dashes] in rows
    assert ["rare", "8", "2e-06", "0", *dashes] in rows


def test_servers_and_profiles_of_a_plan_are_named_briefly(server: Profile, capsys: pytest.CaptureFixture[str]) -> None:
    """The servers of the tightest adapter are spans; of several profiles, which have margins of their own, the largest
    margin is named as such."""
    fleet = Workload([Adapter("hot", 8, 3.0)])
    bins = tuple(Bin((0,), server.settings(1, 8), server, (0.25,)) for _ in range(4))
    hours = Hours().all(bins, fleet)
    rows, figures = Evaluations.of([hour.figures for hour in hours]), merged(fleet, bins, hours)
    given: Any = {"adapters": figures, "margin": 0.04}
    plan = Plan(fleet, bins, rows, Status.FEASIBLE, "gpus", "hand", "twin", **given)
    said = "\n".join(map(str, plan_lines(plan)))
    assert "Tightest    adapter 'hot' on servers 0–3 uses" in said
    assert "with rates raised by 4.0%" in said
    other = replace(server, name="other")
    mixed = replace(plan, bins=(*bins[:3], replace(bins[3], profile=other)))
    assert "with rates raised by up to 4.0%" in "\n".join(map(str, plan_lines(mixed)))
    band = {each: {"gpus": 1, "capacity": 1.0, "objective_value": 5.9} for each in ("most", "fewest")}
    priced = replace(plan, objective="cost", estimate_band=band)
    assert "the fleet takes $5.90 per hour." in "\n".join(map(str, plan_lines(priced)))


@pytest.mark.parametrize(
    ("version", "slots", "dies"), [("0.32.0", 1, True), ("0.32.0", 2, False), ("0.33.0", 1, False)]
)
def test_servers_that_vllm_may_end_are_named(version: str, slots: int, dies: bool, server: Profile) -> None:
    """Before 0.33, vLLM's scheduler asserts that no more adapters run than there are slots, which drafts that end at
    max_model_len break with asynchronous scheduling: a server with too few slots is named."""
    drafts = SpeculationSpec("eagle", 3, 0.5)
    engine = replace(server.engine, version=version, speculation=drafts, async_scheduling=True)
    profile = replace(server, engine=engine)
    fleet = Workload([Adapter(f"a{i}", 8, 0.1) for i in range(2)])
    bins = (Bin((0, 1), profile.settings(slots, 8), profile),)
    figures = TwinPredictor(seed=0).evaluate(fleet, bins)
    plan = Plan(fleet, bins, figures, Status.FEASIBLE, "gpus", "hand", "twin")
    said = f"server 0: vLLM {version} ends in an assertion once"
    for lines in (plan_lines(plan), conclusion_lines(evaluate_plan(plan))):
        assert (said in "\n".join(map(str, lines))) == dies


def test_moves_from_another_plan_are_not_shown(plans: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """A plan that was made from one running plan is compared with any other plan by where adapters are in both."""
    alike = shown([plans[0], "--diff", plans[1]], capsys)
    replace(load_plan(plans[1]), moves=Moves((0, 5), (7, 3))).save(plans[1])
    assert shown([plans[0], "--diff", plans[1]], capsys) == alike
