from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Callable
from html.parser import HTMLParser

import numpy as np
import pytest

from packer.arrival import Arrivals
from packer.evaluation import Evaluations
from packer.export.formats import export_plan
from packer.job import FineTuning
from packer.kv_shape import KvShape
from packer.plan import Plan, Status
from packer.report import context
from packer.report.growth import FACTORS, Evaluate, choose_gpus, growth_of
from packer.report.page import render_report
from packer.room import LEVELS, Room, room_rows
from packer.twin.hours import with_adapters
from packer.words import visible

VOID = {"meta", "link", "input", "br"}
HOSTILE = ('"><script>alert(1)</script>', "{{7*7}}", "</td></table>", "a\u2028b[31m", "\u202egnp.exe", "'\"&")


class Page(HTMLParser):
    """Reads a page strictly: every element must close where it was opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.scripts = 0
        self.links: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Open an element and keep what could reach the network."""
        self.scripts += tag == "script"
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "action", "srcset")]
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """An element of SVG without content."""

    def handle_endtag(self, tag: str) -> None:
        """Close the innermost element."""
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        """Keep the text."""
        self.texts.append(data)


def rows_of(page: str, part: str) -> list[list[str]]:
    """Cells of the rows of the tables in a part of the page: "gpus" or "adapters"."""
    text = page.partition(f'class="{part}"')[2].partition("</section>")[0].replace("<thead><tr>", "")
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", text, re.DOTALL)]


@pytest.fixture
def plan(toy_plan: Callable[..., Plan]) -> Plan:
    """Forty adapters on four servers."""
    return toy_plan([f"adapter-{k}" for k in range(40)], gpus=4)


def test_page_is_well_formed_and_needs_no_network(plan: Plan, saturating: Evaluate) -> None:
    """Every element closes, nothing is loaded from elsewhere, and only our own script runs."""
    page = Page(render_report(plan, growth=growth_of(plan, saturating, predictor="saturating")))
    assert page.links == ["data:,"]
    assert page.scripts == 1


def test_hostile_names_are_text(toy_plan: Callable[..., Plan], saturating: Evaluate) -> None:
    """Whatever an adapter or a workload is called, it appears as text and nothing else."""
    plan = toy_plan(HOSTILE, gpus=1)
    plan = dataclasses.replace(plan, workload=dataclasses.replace(plan.workload, name=HOSTILE[0]))
    rows = [{"solver": name, "GPUs": 3} for name in HOSTILE]
    growth = growth_of(plan, saturating, predictor=HOSTILE[0])
    text = render_report(plan, growth=growth, comparison=rows)
    page = Page(text)
    assert page.scripts == 1
    for name in HOSTILE:
        assert visible(name) in page.texts
    assert not any(sign in text for sign in ("\u2028", "\u202e"))


def test_same_plan_same_bytes(plan: Plan) -> None:
    """The page holds no clock and no chance."""
    assert render_report(plan) == render_report(plan)


def test_every_adapter_is_listed_once_per_server(toy_plan: Callable[..., Plan]) -> None:
    """A replicated adapter shows up on each of its servers with its share."""
    plan = toy_plan(["hot", "b", "c"], gpus=2, replicated=True)
    rows = rows_of(render_report(plan), "adapters")
    assert [row[4] for row in rows if row[0] == "hot"] == ["33 %", "67 %"]
    assert len(rows) == 4


def test_memory_bar_fills_the_gpu(plan: Plan) -> None:
    """Weights, slots, KV cache and the rest, with what training takes, add up to the whole GPU."""
    fleet, trains = (dataclasses.replace(plan.workload, fine_tuning=job) for job in (None, FineTuning()))
    for item in plan.bins:
        parts = context.memory_bars(item, fleet)
        assert sum(part.percent for part in parts) == pytest.approx(100, abs=0.1)
        assert parts[0].text == "weights: 14.9 GiB"
        engine = dataclasses.replace(item.profile.engine, tensor_parallel_size=2)
        pair = dataclasses.replace(item, profile=dataclasses.replace(item.profile, engine=engine))
        assert context.memory_bars(pair, fleet) == parts  # a profile's memory is that of all its GPUs
        model = dataclasses.replace(item.profile.model, kv_shape=KvShape(100, 0.5))
        windowed = dataclasses.replace(item, profile=dataclasses.replace(item.profile, model=model))
        assert context.memory_bars(windowed, fleet) == parts
        kv, rest = context.memory_bars(windowed, trains)[2:]
        assert rest.percent - parts[3].percent == pytest.approx(parts[2].percent - kv.percent, abs=0.1)
        assert kv.percent < parts[2].percent - 0.5


def test_a_pool_reserves_no_slots(plan: Plan) -> None:
    """With unified memory adapters are in the KV cache's pool: no bar shows slots that do not exist."""
    for item in plan.bins:
        memory = dataclasses.replace(item.profile.memory, policy="unified")
        profile = dataclasses.replace(item.profile, memory=memory)
        pool = dataclasses.replace(item, settings=profile.settings(384, 32), profile=profile)
        parts = context.memory_bars(pool, plan.workload)
        assert [part.kind for part in parts] == ["weights", "kv", "rest"]
        assert parts[1].text.startswith("KV cache and adapters: ")
        assert sum(part.percent for part in parts) == pytest.approx(100, abs=0.1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lower_bound": None}, "No lower bound was computed"),
        ({"lower_bound": 4.0, "status": Status.OPTIMAL}, "This plan is optimal"),
        ({"lower_bound": 4.0, "status": Status.FEASIBLE}, "No better plan is known"),
        ({"lower_bound": 3.0}, "4 GPUs; at least 3 (offered load) needed"),
        ({"lower_bound": 3.0, "objective": "cost"}, "within 25.0 % of that bound"),
        ({"status": Status.INFEASIBLE, "unplaced": (0,), "reasons": ("Too hot.",)}, "No plan was found"),
    ],
)
def test_bound_is_put_into_words(plan: Plan, changes: dict[str, object], words: str) -> None:
    """The page says what the bound means for this very plan."""
    changed = dataclasses.replace(plan, **changes)  # type: ignore[arg-type]
    assert words in render_report(changed)


def test_known_errors_have_units(plan: Plan) -> None:
    """The errors of an estimate are shares, which must not be read as percent."""
    profile = dataclasses.replace(plan.bins[0].profile, errors={"base_tpot_p50": 0.05})
    bins = tuple(dataclasses.replace(item, profile=profile) for item in plan.bins)
    assert "p50 to p99 are shares (0.05 is 5 %)" in render_report(dataclasses.replace(plan, bins=bins))


def test_requests_at_a_glance_are_those_of_the_load_beside_them(plan: Plan) -> None:
    """Of adapters with a server, as a mean over the cycle of piecewise rates: the load that is offered is, too."""
    fleet = plan.workload.with_arrivals(Arrivals("piecewise", factors=(1.0, 5.0)))
    figures = Evaluations.of(list(plan.evaluations)[:3])
    placed = dataclasses.replace(plan, workload=fleet, bins=plan.bins[:3], evaluations=figures)
    placed = dataclasses.replace(placed, unplaced=plan.bins[3].adapters)
    sent = 3.0 * sum(fleet.adapters[i].rate for item in placed.bins for i in item.adapters)
    assert f"{sent:,.1f} requests/s" in Page(render_report(placed)).texts


def test_infeasible_plan_without_servers_has_a_page(plan: Plan) -> None:
    """Even nothing can be reported, with its reasons."""
    empty = dataclasses.replace(
        plan, bins=(), evaluations=Evaluations.of([]), status=Status.INFEASIBLE, reasons=("All too hot.",)
    )
    assert "All too hot." in Page(render_report(empty)).texts


def test_growth_ends_where_a_server_breaks(plan: Plan, saturating: Evaluate) -> None:
    """A server keeps its figures up to the factor at which it starves, and is not evaluated again."""
    queried: list[int] = []

    def evaluate(fleet, bins):  # type: ignore[no-untyped-def]
        queried.append(len(bins))
        return saturating(fleet.scaled(3.0), bins)

    growth = growth_of(plan, evaluate, predictor="x")
    assert growth is not None
    load = plan.workload.offered_tok_s / 4 * 3
    first = next(factor for factor in FACTORS if load * factor > 4000 / 0.9)
    ends = [growth.breaks_at(row) for row in range(4)]
    assert min(FACTORS[end] for end in ends if end is not None) == pytest.approx(first, abs=0.11)
    assert queried == sorted(queried, reverse=True)
    assert queried[-1] < 4
    for row, end in enumerate(ends):
        known = end + 1 if end is not None else len(FACTORS)
        finite = np.isfinite(growth.mean_ttft_ms[:, row]).tolist()
        assert finite == [True] * known + [False] * (len(FACTORS) - known)
    table = growth.rows()
    assert [row[1].split(" ")[0] for row in table] == [str(int((~row).sum())) for row in growth.holds]


def test_figures_of_today_are_those_of_the_plan(plan: Plan, saturating: Evaluate) -> None:
    """The predictor of the plan has evaluated its servers at today's rates: that is not done again."""
    rates: list[float] = []

    def evaluate(fleet, bins):  # type: ignore[no-untyped-def]
        rates.append(float(fleet.rates.sum() / plan.workload.rates.sum()))
        return saturating(fleet, bins)

    growth = growth_of(plan, evaluate, predictor=plan.predictor)
    assert growth is not None
    assert growth.mean_ttft_ms[0].tolist() == plan.evaluations.mean_ttft_ms.tolist()
    assert min(rates) > 1.05


def test_replayed_traces_do_not_grow(plan: Plan, saturating: Evaluate) -> None:
    """The rates of a trace can't be multiplied, so the page leaves that section out."""
    from packer.arrival import Arrivals, RequestTrace

    ones = np.ones(1, dtype=np.int64)
    trace = RequestTrace(np.zeros(1), np.zeros(1, dtype=np.int64), ones, ones.copy())
    fleet = plan.workload.with_arrivals(Arrivals("trace", trace=trace))
    replayed = dataclasses.replace(plan, workload=fleet)
    assert growth_of(replayed, saturating, predictor="x") is None
    assert "If every rate grows" not in render_report(replayed)


def test_limited_growth_shows_the_slowest(plan: Plan) -> None:
    """With a limit, the GPU with the longest TTFT is among those drawn; one without requests is not the slowest."""
    rows = [dataclasses.replace(row, mean_ttft_ms=float(k % 7)) for k, row in enumerate([*plan.evaluations] * 5)]
    for k in range(5):
        rows[k] = dataclasses.replace(rows[k], mean_ttft_ms=np.nan, worst_adapter_ttft_ms=0.0)
    chosen = choose_gpus(Evaluations.of(rows), 4)
    assert len(chosen) == 4
    assert {6, 13} <= set(chosen)


def test_large_report_is_small(toy_plan: Callable[..., Plan], saturating: Evaluate) -> None:
    """1,000 adapters on 60 GPUs stay below 5 MB, curves of every GPU included."""
    plan = toy_plan([f"customer-{k:04d}-support-bot" for k in range(1000)], gpus=60)
    text = render_report(plan, growth=growth_of(plan, saturating, predictor="saturating"))
    assert len(text.encode()) < 5_000_000
    assert text.count("<tr>") > 1060


def test_comparison_shows_what_differs(plan: Plan) -> None:
    """Of a long comparison the page shows solvers, GPUs and what differs, under names for people."""
    rows = [
        {"solver": name, "objective": "gpus", "gpus": count, "runtime_s": 0.5, "reference_mean_ttft_ms": ttft, "x": 1}
        for name, count, ttft in (("greedy", 3, 80.0), ("maxbase", 4, 50.0))
    ]
    page = Page(render_report(plan, comparison=rows))
    assert "mean TTFT, ms" in page.texts
    assert "maxbase" in page.texts
    assert "objective" not in page.texts
    assert "x" not in page.texts


def test_growth_that_was_not_searched_beyond_says_so(plan: Plan) -> None:
    """At the largest factor that the headroom tries, more may be possible: the page says so."""
    known = [1.23, LEVELS[-1], None, LEVELS[-1] / 1.04]
    page = render_report(dataclasses.replace(plan, headroom=known))
    assert [row[11] for row in rows_of(page, "gpus")] == ["+23%", "&gt; +300%", "–", "+284%"]


def test_one_thing_is_singular(toy_plan: Callable[..., Plan]) -> None:
    """One GPU is not called GPUs, nor one adapter adapters."""
    plan = toy_plan(["a"], gpus=1)
    text = render_report(plan)
    assert '<div class="tile"><b>1</b>GPU<small>' in text
    assert '<div class="tile"><b>1</b>adapter placed<small>of 1</small>' in text
    assert "server 0: 1 adapter <" in text
    assert "1 GPUs" not in text
    assert "1 adapters" not in text
    assert "server 1: 2 adapters <" in render_report(toy_plan(["a", "b", "c", "d"]))


def test_a_recommended_plan_opens_with_its_decision(toy_plan: Callable[..., Plan]) -> None:
    """The decision stands first, and the frontier is drawn with the goal and the plan's GPUs marked."""
    row = {"p95_ttft_ms": 300.0, "worst_adapter_ttft_ms": 500.0, "mean_itl_ms": 30.0}
    frontier = tuple({"n_gpus": n, **{key: value / n for key, value in row.items()}} for n in (1, 2, 3))
    plan = toy_plan(["a", "b"])
    told = dataclasses.replace(plan, decision="2 GPUs: <fine>.", frontier=frontier)
    page = render_report(told)
    assert "2 GPUs: &lt;fine&gt;." in page
    assert page.count("this plan</text>") == 2
    assert "worst adapter: 2, 250" in page
    alone = dataclasses.replace(told, frontier=frontier[:1])
    assert "GPUs against latency" not in render_report(alone)


def test_a_number_of_gpus_on_which_an_adapter_gets_no_answer_leaves_a_gap(toy_plan: Callable[..., Plan]) -> None:
    """The curve of the worst adapter has no point there; that of all requests has."""
    row = {"p95_ttft_ms": 300.0, "worst_adapter_ttft_ms": None, "mean_itl_ms": 30.0}
    frontier = ({**row, "n_gpus": 1}, {**row, "n_gpus": 2, "worst_adapter_ttft_ms": 250.0})
    page = render_report(dataclasses.replace(toy_plan(["a", "b"]), frontier=frontier))
    assert "all requests: 1, 300" in page
    assert "worst adapter: 2, 250" in page
    assert "worst adapter: 1, " not in page


def test_each_server_has_a_command_to_copy(toy_plan: Callable[..., Plan]) -> None:
    """The page holds the start command of every server as a shell reads it, whatever the adapters are called."""
    hostile_plan = toy_plan([*HOSTILE, "it's", "$(id)"], gpus=3)
    page = Page(render_report(hostile_plan))
    commands = [text for text in page.texts if text.startswith("vllm serve ")]
    entries = json.loads(export_plan(hostile_plan, "vllm")["args.json"])
    assert len(commands) == len(entries)
    for text, entry, item in zip(commands, entries, hostile_plan.bins, strict=True):
        words = shlex.split(text)
        assert words[:3] == entry["command"][:3]
        assert words[words.index("--lora-modules") :] == entry["command"][entry["command"].index("--lora-modules") :]
        assert words[words.index("--max-loras") + 1] == str(item.max_loras)


def test_servers_that_cant_be_started_as_planned_are_explained(toy_plan: Callable[..., Plan]) -> None:
    """A page without start commands says why there are none."""
    plan = toy_plan(["a", "b"])
    profile = dataclasses.replace(plan.bins[0].profile, provenance={"weights": "awq, not those of acme/toy-7b"})
    bins = tuple(dataclasses.replace(each, profile=profile) for each in plan.bins)
    page = Page(render_report(dataclasses.replace(plan, bins=bins)))
    assert "How each server is started" in page.texts
    assert any(text.startswith("The plan is for weights in awq") for text in page.texts)


def test_each_adapter_has_its_latency(toy_plan: Callable[..., Plan]) -> None:
    """The table of a GPU's adapters shows each one's TTFT, ITL and share within limits, beside its own name."""
    plan = with_adapters(toy_plan(["a", "b", "c"], gpus=2))
    assert plan.adapters is not None
    rows = rows_of(render_report(plan), "adapters")
    assert {row[0]: row[5] for row in rows} == {
        name: context.milliseconds(value)
        for name, value in zip(plan.workload.names, plan.adapters.mean_ttft_ms, strict=True)
    }
    assert all(row[8] == "100.0 %" and row[6] != "–" and row[7] != "–" for row in rows)
    bare = render_report(dataclasses.replace(plan, adapters=None))
    assert {cell for row in rows_of(bare, "adapters") for cell in row[5:]} == {"–"}


def test_room_to_grow_and_what_limits_it(toy_plan: Callable[..., Plan]) -> None:
    """The page has the headroom of each server, what limits it and what helps; without them it has no such section."""
    plan = toy_plan(["a", "b", "c"], gpus=3)
    rooms = (Room(1.36, "slots", "16 of 16 in use at +47%", "max_loras 24"), Room(3.9960), Room(None))
    page = render_report(dataclasses.replace(plan, rooms=rooms))
    assert "How far each server may go" in page
    assert "slots: 16 of 16 in use at +47%" in page
    assert "max_loras 24" in page
    assert [row[1] for row in room_rows(rooms)] == ["+36%", "> +300%", "none"]
    assert "How far each server may go" not in render_report(plan)


def test_a_gpu_beyond_its_limits_does_not_hold(plan: Plan) -> None:
    """Neither its result nor its room to grow says that it is well, however much load it would serve."""
    used = np.where(np.arange(len(plan.bins)) == 0, 3.0, 0.5)
    broken = dataclasses.replace(plan, headroom=(), evaluations=dataclasses.replace(plan.evaluations, slo_used=used))
    rows = rows_of(render_report(broken), "gpus")
    assert [row[-1] for row in rows] == ["beyond limits", *["holds"] * (len(plan.bins) - 1)]
    assert rows[0][11] == "–"


def test_queueing_gpus_are_named_and_a_bound_counts_gpus(plan: Plan) -> None:
    """A plan for the fewest GPUs says which of them queue; its bound is a number of GPUs, not a percentage."""
    slow = dataclasses.replace(
        plan,
        objective="gpus",
        status=Status.FEASIBLE,
        lower_bound=1.0,
        within_goal={},
        evaluations=dataclasses.replace(plan.evaluations, mean_ttft_ms=np.full(len(plan.bins), 3600.0)),
    )
    page = Page(render_report(slow))
    assert any("server 0 queues: mean TTFT 3.6 s" in text for text in page.texts)
    assert any("at least 1 needed" in text for text in page.texts)
    assert not any("within" in text and "% of that bound" in text for text in page.texts)
