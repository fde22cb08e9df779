"""What limits a server is the resource that is used up, and the advice relieves it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

import packer
from packer import Adapter, Lengths, Workload
from packer.arrival import Arrivals, Bursts
from packer.job import FineTuning
from packer.twin import limits
from packer.twin.limits import BEFORE_TRAFFIC, Limit, _limits, _more_slots, limit_of, setting_helps, thrashes
from packer.twin.override import with_engine
from packer.twin.run import Run


def run(fleet: Workload, max_loras: int, rank: int | None = None) -> Run:
    """A quarter of an hour of a shipped server."""
    server = packer.load_profile("h100-64gb/llama-3.1-8b-instruct")
    return packer.simulate(fleet, server, max_loras=max_loras, max_lora_rank=rank, duration_s=900.0)


def test_slots_limit_many_adapters_in_few_of_them() -> None:
    """With two slots for forty adapters all of them are in use; the slots that are named serve the load faster."""
    fleet = Workload([Adapter(f"a{k}", 8, 0.2) for k in range(40)])
    tight = run(fleet, 2)
    found = limit_of(tight)
    assert found.name == "slots"
    assert found.usage == "2 of 2 in use"
    assert found.advice == "max_loras 3"
    assert run(fleet, 3).mean_ttft_ms < tight.mean_ttft_ms
    assert _more_slots(tight, 0.9, lambda **_: True) == "fewer adapters per GPU", "the KV cache is full"
    assert _more_slots(tight, 0.5, lambda **_: False) == "fewer adapters per GPU", "more slots are known not to help"


@pytest.mark.parametrize("max_num_seqs", [32, 64])
def test_a_server_without_tokenizers_for_its_adapters_is_limited_by_its_front_end(max_num_seqs: int) -> None:
    """The API server loads tokenizers all the time: full batches and answers that it holds back follow from that. With
    as many as adapters, as advised, it serves the load."""
    fleet = Workload([Adapter(f"a{k}", 8, 0.03) for k in range(400)])
    server = packer.load_profile("h100-64gb/llama-3.1-8b-instruct")
    few, enough = (
        packer.simulate(fleet, with_engine(server, max_num_seqs=n), max_loras=64, duration_s=1800.0)
        for n in (max_num_seqs, 400)
    )
    found = limit_of(few)
    assert (found.name, "max_num_seqs 400, for their tokenizers" in found.advice) == ("front end", True)
    assert few.starved
    assert enough.served_share > 0.9


def test_large_ranks_are_named_only_where_they_leave_no_room_for_slots() -> None:
    """Smaller slots make room for more of them, which is no help where more fit."""
    ranks = [Adapter(f"a{k}", 128 if k < 4 else 8, 0.2) for k in range(40)]
    tight = run(Workload(ranks), 2)
    assert _more_slots(tight, 0.5, lambda **_: True) == "max_loras 3"
    assert _more_slots(tight, 0.5, lambda **_: False) == "fewer adapters per GPU"
    assert "moving the 4 adapters of rank 128 away" in _more_slots(tight, 0.9, lambda **_: True)


def test_long_requests_use_up_the_cache() -> None:
    """Requests of many tokens fill the KV cache; a few adapters of a large rank that cost memory are named."""
    fleet = Workload(
        [Adapter(f"a{k}", 128 if k < 2 else 8, 0.05) for k in range(24)],
        Lengths.constant(6000.0), Lengths.constant(4000.0),
    )  # fmt: skip
    found = limit_of(run(replace(fleet, slo=packer.Slo.of(2000.0, 1000.0)), 24))
    assert found.name == "KV cache"
    assert "moving the 2 adapters of rank 128 away" in found.advice


def test_what_helps_against_much_prefill_can_be_done() -> None:
    """Larger steps are no setting of a command, and with twice the tokens ITL is twice as long."""
    fleet = Workload([Adapter("a", 8, 20.0, Lengths.constant(2000.0), Lengths.constant(2.0))])
    found = limit_of(run(replace(fleet, slo=packer.Slo.of(2000.0, 10_000.0)), 1))
    assert (found.name, found.advice) == ("prefill", "fewer requests per GPU")


def test_a_tight_limit_of_the_itl_is_step_time() -> None:
    """An ITL near its limit is the time of a step."""
    fleet = Workload([Adapter(f"a{k}", 8, 0.5) for k in range(8)])
    strict = replace(fleet, slo=packer.Slo.of(2000.0, 15.0))
    assert limit_of(run(strict, 8)).name == "step time"


def test_first_requests_of_many_adapters_wait_in_the_front_end() -> None:
    """Where most requests are the first of their adapter, the API server takes more of the TTFT than the engine."""
    fleet = Workload([Adapter(f"a{k}", 8, 0.001) for k in range(800)])
    assert limit_of(run(fleet, 96)).name == "front end"


def test_more_sequences_keep_more_tokenizers() -> None:
    """Before vLLM 0.11 an API server with fewer `max_num_seqs` than adapters loads tokenizers again and again: the
    number that is advised ends that."""
    fleet = Workload([Adapter(f"a{k}", 8, 0.01) for k in range(300)])
    profile = with_engine(packer.load_profile("h100-64gb/llama-3.1-8b-instruct"), max_num_seqs=64)
    short = packer.simulate(fleet, profile, max_loras=64, duration_s=1800.0)
    assert limit_of(short).advice == "max_num_seqs 300, for their tokenizers, or fewer adapters per GPU"
    near = Workload([Adapter(f"a{k}", 8, 0.02) for k in range(265)])
    start = [with_engine(profile, max_num_seqs=256, warm_start=warm) for warm in (None, True)]
    late = [packer.simulate(near, each, max_loras=128, duration_s=600.0).late[0].size for each in start]
    assert late[0] > 100 > 5 > late[1]  # a request to each adapter helps where most tokenizers are kept, too
    ample = packer.simulate(fleet, with_engine(profile, max_num_seqs=300), max_loras=64, duration_s=1800.0)
    assert ample.mean_ttft_ms < 0.3 * short.mean_ttft_ms


def test_first_uses_of_adapters_break_a_limit_that_they_exceed() -> None:
    """Where adapters are used for the first time all over the hour, and each first use takes about as long as TTFT may,
    first uses limit the server, by the work of the API server from the profile; without it the limit is kept. Requests
    that wait for one of few slots do not wait for first uses, though these occur meanwhile, too."""
    strict = packer.Slo.of(290.0, 100.0)
    quiet = Workload([Adapter(f"a{k}", 8, 0.004) for k in range(200)], slo=strict)
    profile = packer.load_profile("h100-64gb/llama-3.1-8b-instruct")
    hour = packer.simulate(quiet, profile, max_loras=200)
    assert hour.slo_used > 1.0
    found = limit_of(hour)
    assert (found.name, found.advice) == ("first use", BEFORE_TRAFFIC)
    swift = replace(profile, frontend=replace(profile.frontend, first_use_ms=0.0))
    assert packer.simulate(quiet, swift, max_loras=200).slo_used < 1.0
    warm = with_engine(profile, warm_start=True)
    assert packer.simulate(quiet, warm, max_loras=200).slo_used < 1.0
    short = with_engine(profile, warm_start=True, max_num_seqs=100)
    assert limit_of(packer.simulate(quiet, short, max_loras=100)).advice != BEFORE_TRAFFIC
    assert limit_of(packer.simulate(quiet, profile, max_loras=4)).name == "slots"


def test_requests_that_come_together_are_bursts() -> None:
    """A server of which little is in use on average, and whose requests wait at times, is limited by bursts."""
    long = Lengths.gamma(mean=2000.0, cv=1.0), Lengths.gamma(mean=30.0, cv=1.0)
    steady = Workload([Adapter("a", 8, 1.0)], *long)
    factor = Bursts(2.5, ((8.0, 1.0),))
    found = limit_of(run(steady.with_arrivals(Arrivals("bursty", own=factor)), 1))
    assert found.name == "bursts"
    assert "of the time, up to " in found.usage
    assert limit_of(run(steady, 1)).name != "bursts"


def test_without_a_queue_steps_take_the_time() -> None:
    """A server that breaks a tight TTFT limit while hardly any request waits is limited by its steps, not by the small
    part of the TTFT that passes in the API server."""
    fleet = Workload([Adapter(f"a{k}", 8, 1.0) for k in range(3)]).held_to("p95_ttft_ms=40")
    hour = run(fleet, 3)
    assert hour.slo_used > 1.0
    assert hour.engine_mean_ttft_ms > 0.8 * hour.mean_ttft_ms
    found = limit_of(hour)
    assert (found.name, found.advice) == ("step time", "fewer requests per GPU")
    assert found.usage.startswith(f"TTFT {hour.mean_ttft_ms:.0f} ms almost without waiting, ITL ")


def test_a_server_of_the_base_model_alone_has_a_limit() -> None:
    """It has no slots that could be short."""
    run = packer.simulate(
        Workload([Adapter("base", 0, 60.0)]),
        packer.load_profile("h100-64gb/llama-3.1-8b-instruct"),
        max_loras=1,
        duration_s=300.0,
    )
    assert limit_of(run).name != "slots"


def test_a_queue_limit_that_refuses_requests_is_named() -> None:
    """A server that refuses requests by its `max_num_queued_reqs`, while it has room for more, is limited by it, and
    serves more with the advice; where requests wait for something else, or none is refused, that is the limit."""
    server = packer.load_profile("h100-64gb/llama-3.1-8b-instruct")

    def found(queue: int, max_loras: int, factor: float = 1.0) -> tuple[Run, Limit]:
        engine = replace(server.engine, version="0.32.0", max_num_queued_reqs=queue)
        fleet = Workload([Adapter(f"a{k}", 8, 0.5 * factor) for k in range(40)])
        profile = replace(server, engine=engine)
        hour = packer.simulate(fleet, profile, max_loras=max_loras, duration_s=900.0)
        return hour, limit_of(hour)

    tight, limit = found(20, 40)
    assert (limit.name, limit.advice) == ("queue limit", "max_num_queued_reqs 40")
    assert limit.usage == f"at most 20 requests wait or run, {tight.refused:,} of {tight.sent:,} are refused"
    assert found(40, 40)[0].served_share > tight.served_share
    assert limit_of(replace(tight, max_outstanding=20)).name != "queue limit"  # the client refuses them
    few, slots = found(200, 2)
    assert few.refused > 0
    assert slots.name == "slots"
    wide, other = found(2000, 40, 0.1)
    assert wide.refused == 0
    assert other.name != "queue limit"


def test_what_helps_leaves_the_memory_of_training() -> None:
    """Fewer slots give the tokens that a server with these slots has beside its training."""
    adapters = [Adapter(f"a{k}", 8 if k else 16, 0.5) for k in range(3)]
    fleet = Workload(adapters, Lengths.constant(3000), Lengths.constant(200), fine_tuning=FineTuning())
    advice = {each.name: each.advice for each in _limits(run(fleet, 8))}["KV cache"]
    assert f"max_loras 3 gives {run(fleet, 3).kv_cache_tokens:,} tokens" in advice
    assert f"(+{run(fleet.subset([1, 2]), 8, 8).kv_cache_tokens - run(fleet, 8).kv_cache_tokens:,} KV" in advice


def test_first_loads_are_no_thrashing() -> None:
    """With a slot for each adapter, a run that ends before most requests has loads, but no slot is used again."""
    fleet = Workload([Adapter(f"a{k}", 8, 1.0) for k in range(24)])
    server = packer.load_profile("h100-64gb/llama-3.1-8b-instruct")
    short = packer.simulate(fleet, server, max_loras=24, duration_s=2.0)
    assert short.loads_per_request > 1.0
    assert not thrashes(short)
    four = packer.Cluster.of(server, 4, max_loras=24, max_lora_rank=8)
    many = packer.simulate_cluster(fleet, four, router="round-robin", duration_s=5.0)
    assert many.adapter_loads > 24
    assert many.loads_per_request > 1.0
    assert not thrashes(many)


def test_a_setting_that_serves_less_does_not_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """Latencies fall where fewer requests are served: such a setting is not advised, unless it is chance."""
    profile = packer.load_profile("h100-64gb/llama-3.1-8b-instruct")
    sim = SimpleNamespace(profile=profile, max_loras=8, served_share=0.9, closed_loop=False, slo_used=3.0)
    for served, helps in ((0.88, False), (0.895, True)):
        again = SimpleNamespace(status="ok", served_share=served, slo_used=0.5)
        monkeypatch.setattr(limits, "_changed", lambda *_, again=again: again)
        assert setting_helps(cast("Any", sim), 16) is helps
