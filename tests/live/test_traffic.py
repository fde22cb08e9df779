"""What running servers have to do, read from their metrics."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np
import pytest

from packer.live.metrics import Page, page_of
from packer.live.traffic import PRIOR, Traffic, _in_flight

PAGE = """\
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0"} 1000
vllm:prompt_tokens_total{engine="1"} 500
vllm:generation_tokens_total{engine="0"} 2.5e3
vllm:inter_token_latency_seconds_sum{engine="0"} 4.0
vllm:inter_token_latency_seconds_count{engine="0"} 200
vllm:lora_requests_info{max_lora="4",running_lora_adapters="old",waiting_lora_adapters=""} 100.0
vllm:lora_requests_info{max_lora="4",running_lora_adapters="a,b",waiting_lora_adapters="c"} 101.0
damaged{ 1 2 x
vllm:damaged
vllm:prompt_tokens_total{engine="2"} NaN
"""


def test_a_page_gives_counters_and_the_latest_list_of_adapters() -> None:
    """Engines are added, the list with the largest time counts, damaged lines are passed over."""
    look = page_of(PAGE, 7.0)
    assert look.figures == {"prompt": 1500.0, "generated": 2500.0, "itl_s": 4.0, "itls": 200.0}
    assert look.adapters == {"a", "b", "c"}


def test_requests_whose_adapters_are_not_named_are_none_of_theirs() -> None:
    """Pages of vLLM with one list for all states name the adapters of running requests alone; an older page without
    a number of requests has one for each name."""
    named = [
        Page(0.0, {"running": 3.0, "waiting": 5.0}, frozenset("ab"), all_named=each).named for each in (False, True)
    ]
    assert named == [3.0, 8.0]
    assert Page(0.0, {}, frozenset("ab")).named == 2.0
    assert Page(0.0, {"running": 3.0}).named == 0.0


def traffic(*looks: Page) -> Traffic:
    found = Traffic([], 1800.0)
    found.looks = [deque(replace(look, figures={"generated": 0.0, **look.figures}) for look in looks)]
    found.planned = [deque({} for _ in looks)]
    found.times_s = deque(look.time_s for look in looks)
    return found


def test_a_rate_survives_a_restart() -> None:
    """A counter that fell began anew: what it counts since then is its growth."""
    none = frozenset[str]()
    seen = traffic(
        Page(0.0, {"prompt": 100.0}, none), Page(10.0, {"prompt": 300.0}, none), Page(20.0, {"prompt": 50.0}, none)
    )
    assert seen.tok_s(0) == pytest.approx((200.0 + 50.0) / 20.0)
    assert seen.tok_s(0, span_s=10.0) == pytest.approx(5.0)
    assert seen.tok_s(0, span_s=10.0, skip_s=10.0) == pytest.approx(20.0)
    assert traffic().tok_s(0) is None


def test_a_page_that_counts_nothing_is_no_time_without_tokens() -> None:
    """Pages that can't be read hide no tokens between others that count; before and after these nothing is known."""
    blind = [Page(t, {"generated": 0.0, "prompt_renamed": 1.0}) for t in (0.0, 20.0, 40.0)]
    first, last = Page(10.0, {"prompt": 100.0}), Page(30.0, {"prompt": 500.0})
    seen = traffic(blind[0], first, blind[1], last, blind[2])
    assert seen.tok_s(0) == pytest.approx(20.0)
    assert traffic(blind[0], first).tok_s(0) is None
    assert traffic(*blind).tok_s(0) is None


def test_a_server_that_is_gone_has_done_nothing_since() -> None:
    """What a server did before it was lost is spread over all the time that was looked at."""
    seen = traffic(Page(0.0, {"prompt": 100.0}), Page(10.0, {"prompt": 300.0}))
    assert seen.tok_s(0) == pytest.approx(20.0)
    seen.times_s.extend((20.0, 30.0, 40.0))
    assert seen.tok_s(0) == pytest.approx(5.0)
    assert seen.tok_s(0, span_s=20.0) == 0.0


def shares(looks: int, names: str, requests: float, planned: dict[str, float]) -> dict[str, float]:
    """The shares after so many looks, all with these names and requests in flight."""
    seen = traffic(*(Page(float(k), {"running": requests}, frozenset(names)) for k in range(looks)))
    seen.planned = [deque([planned] * looks)]
    return seen.shares(0, planned, seen.factors())


def test_shares_move_from_the_planned_ones_to_those_seen() -> None:
    """With no look the plan's shares hold; an adapter that alone is always in flight gets most of the load."""
    planned = {"a": 3.0, "b": 1.0}
    assert shares(0, "", 0.0, planned) == {"a": 0.75, "b": 0.25}
    assert 0.5 < shares(9, "b", 1.0, planned)["b"] < shares(90, "b", 1.0, planned)["b"]
    assert shares(90, "b", 1.0, planned)["b"] > 0.95


def test_names_on_every_page_of_a_busy_server_say_nothing_of_the_shares() -> None:
    """Pages have the names of adapters in flight, not the number of requests of each: where all are always in flight,
    as they are planned to be, a hot adapter keeps its share of the load."""
    planned = {"a": 90.0, "b": 6.0, "c": 4.0}
    found = shares(200, "abc", 100.0, planned)
    assert found == pytest.approx({"a": 0.9, "b": 0.06, "c": 0.04}, abs=0.01)


def test_shares_are_the_likeliest_ones_by_how_often_adapters_are_named() -> None:
    """The factor of an adapter maximises the posterior density of its requests in flight, whose number is Poisson's,
    where each of the plan's looks counts as one with the planned number."""
    for planned, pages, named in (
        (0.01, 30, 2),
        (0.5, 30, 25),
        (3.0, 200, 20),
        (40.0, 60, 60),
        (0.1, 5, 5),
        (2.0, 9, 0),
    ):
        m = np.geomspace(1e-5, 400.0, 400_001)
        density = PRIOR * (planned * np.log(m) - m) + named * np.log(-np.expm1(-m)) - (pages - named) * m
        # The mode of the gamma prior in log m, in which it has the planned number.
        assert _in_flight(planned, pages, named) == pytest.approx(m[density.argmax()], rel=1e-3)


def test_requests_to_the_base_model_are_on_no_list() -> None:
    """Pages name adapters alone: that the base model is never named does not make its share smaller."""
    planned = {"base": 5.0, "a": 5.0}
    seen = traffic(*(Page(float(k), {"running": 10.0}, frozenset("a")) for k in range(50)))
    seen.planned = [deque([planned] * 50)]
    assert seen.shares(0, planned, seen.factors({"base"}))["base"] == pytest.approx(0.5, abs=0.02)


def test_an_adapter_that_moved_has_its_share_of_what_its_old_server_did() -> None:
    """What a server did before an adapter left it is attributed by the placement of that time, not by the present one;
    an adapter that is named without a planned load there has one request."""
    before, now = {"hot": 90.0, "cold": 10.0}, {"cold": 10.0}
    looks = [Page(float(k), {"running": 20.0}, frozenset({"hot", "cold"})) for k in range(10)]
    looks += [Page(10.0, {"running": 2.0}, frozenset({"hot", "cold"}))]
    seen = traffic(*looks)
    seen.planned = [deque([before] * 10 + [now])]
    assert seen.shares(0, now, {})["hot"] == pytest.approx((0.9 * 200.0 + 1.0) / 202.0)


def test_a_mean_latency_needs_requests() -> None:
    """Fewer than fifty say nothing; more give their mean."""
    few = traffic(Page(0.0, {}, frozenset()), Page(1.0, {"itl_s": 1.0, "itls": 10.0}, frozenset()))
    assert few.mean_ms(0, "itl") is None
    many = traffic(Page(0.0, {"itl_s": 0.0, "itls": 0.0}), Page(1.0, {"itl_s": 4.0, "itls": 200.0}))
    assert many.mean_ms(0, "itl") == pytest.approx(20.0)
