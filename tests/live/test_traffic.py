"""What running servers have to do, read from their metrics."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest

from packer.live.metrics import Page, page_of
from packer.live.traffic import Traffic

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


def traffic(*looks: Page) -> Traffic:
    found = Traffic([], 1800.0)
    found.looks = [deque(replace(look, figures={"generated": 0.0, **look.figures}) for look in looks)]
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


def test_shares_move_from_the_planned_ones_to_those_seen() -> None:
    """With no look the plan's shares hold; an adapter that is always in flight gets most of the load."""
    planned = {"a": 3.0, "b": 1.0}
    assert traffic().shares(0, planned) == {"a": 0.75, "b": 0.25}
    busy = traffic(*(Page(float(k), {}, frozenset("b")) for k in range(90)))
    assert busy.shares(0, planned)["b"] == pytest.approx((2.5 + 90.0) / 100.0)


def test_a_mean_latency_needs_requests() -> None:
    """Fewer than fifty say nothing; more give their mean."""
    few = traffic(Page(0.0, {}, frozenset()), Page(1.0, {"itl_s": 1.0, "itls": 10.0}, frozenset()))
    assert few.mean_ms(0, "itl") is None
    many = traffic(Page(0.0, {"itl_s": 0.0, "itls": 0.0}), Page(1.0, {"itl_s": 4.0, "itls": 200.0}))
    assert many.mean_ms(0, "itl") == pytest.approx(20.0)
