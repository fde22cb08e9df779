"""The default predictor where no trees were trained for a profile."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from packer.adapter import Adapter
from packer.arrival import Arrivals, Bursts
from packer.bin import Bin
from packer.errors import IncompatibleError, PackerError, ValidationError
from packer.io.profiles import load_profile
from packer.planning.solve import solve
from packer.predictors.api import evaluate_server, load_predictor
from packer.predictors.auto import AutoPredictor
from packer.predictors.learned import BoostingPredictor
from packer.predictors.scenarios import scenario
from packer.predictors.twin import TwinPredictor
from packer.profile import Profile
from packer.sessions import Sessions
from packer.speculation import SpeculationSpec
from packer.testing.analytic import random_fleet
from packer.workload import Workload


@pytest.fixture(scope="module")
def slower() -> Profile:
    """An H100 at half its speed and with half of its KV cache: no trees were trained for it."""
    known = load_profile("h100-64gb/llama-3.1-8b-instruct")
    terms = {name: 2.0 * value for name, value in known.latency.coefficients.items()}
    memory = replace(known.memory, kv_budget_bytes=known.memory.kv_budget_bytes / 2, measured=(), min_kv_tokens=8192)
    engine = replace(known.engine, max_model_len=8192)
    return replace(known.with_coefficients(**terms), name="slower", memory=memory, engine=engine)


def test_a_predictor_passes_between_processes() -> None:
    """The default predictor can be sent to worker processes, and gives the same figures there."""
    profile = load_profile("h100-64gb/llama-3.1-8b-instruct")
    fleet, predictor = random_fleet(4, seed=1), load_predictor("auto", profile)
    bins = [Bin((0, 1, 2, 3), profile.settings(4, 32), profile)]
    again = pickle.loads(pickle.dumps(predictor))
    assert repr(again.evaluate(fleet, bins)) == repr(predictor.evaluate(fleet, bins))


def test_trees_of_another_profile_lead_searches_only(slower: Profile) -> None:
    """They know most servers that starve; what they say is never reported."""
    auto = AutoPredictor.for_profile(slower)
    assert auto.learned is None
    search = auto.for_search()
    alike, n = 0, 20
    for i in range(n):
        chosen = scenario(300 + i, slower, 1)
        bins = [chosen.bin(slower)]
        guess = search.evaluate(chosen.workload, bins)
        result = TwinPredictor().evaluate(chosen.workload, bins)
        alike += bool(guess.starved[0] == result.starved[0])
    assert alike >= 0.85 * n
    assert search.left_to_twin == 0
    fleet = random_fleet(10, seed=1)
    one = [Bin(tuple(range(10)), slower.settings(10, 32), slower)]
    reported, simulated = auto.evaluate(fleet, one), TwinPredictor().evaluate(fleet, one)
    assert np.array_equal(reported.mean_ttft_ms, simulated.mean_ttft_ms)


def test_requests_to_the_base_model_go_to_the_twin() -> None:
    """Trees that never saw requests without an adapter refuse them; the default predictor simulates their servers."""
    known = load_profile("h100-64gb/llama-3.1-8b-instruct")
    fleet = random_fleet(6, seed=4)
    fleet = replace(fleet, adapters=(*fleet.adapters, Adapter("base", 0, 0.5)))
    bins = [Bin((0, 1, 6), known.settings(2, 32), known), Bin((2, 3), known.settings(2, 32), known)]
    auto = AutoPredictor.for_profile(known)
    assert auto.learned is not None
    with pytest.raises(IncompatibleError, match="rank 0"):
        auto.learned.evaluate(fleet, bins)
    found, simulated = auto.evaluate(fleet, bins), TwinPredictor().evaluate(fleet, bins)
    assert auto.left_to_twin == 1
    assert found.mean_ttft_ms[0] == simulated.mean_ttft_ms[0]


def test_servers_without_slots_go_to_the_twin() -> None:
    """A server of the base model alone needs no slots, and adapters on a server without slots are an error."""
    known = load_profile("h100-64gb/llama-3.1-8b-instruct")
    base, one = Workload([Adapter("base", 0, 1.0)]), Workload([Adapter("a", 8, 1.0)])
    found, simulated = (evaluate_server(base, known, max_loras=0, predictor=name) for name in ("auto", "twin"))
    assert found == simulated
    for name in ("auto", "boosting", "twin"):
        with pytest.raises(ValidationError, match=r"max_loras of a server with adapters.* got 0"):
            evaluate_server(one, known, max_loras=0, predictor=name)


@pytest.mark.parametrize("given", [{"sessions": Sessions(3.0)}, {"shared_prefix_tokens": 200}])
def test_sessions_and_cached_prefixes_go_to_the_twin(given: dict[str, object]) -> None:
    """Trees that never saw requests that belong together refuse them; the default predictor simulates their servers."""
    known = load_profile("h100-64gb/llama-3.1-8b-instruct")
    caching = replace(known, engine=replace(known.engine, version="0.32.0", prefix_caching=True))
    fleet = random_fleet(3, seed=4)
    fleet = replace(fleet, adapters=tuple(replace(each, **given) for each in fleet.adapters))
    learned = BoostingPredictor.guide(caching)
    bins = [Bin((0, 1), caching.settings(2, 32), caching)]
    with pytest.raises(IncompatibleError, match="take the predictor auto or twin"):
        learned.evaluate(fleet, bins)
    auto = AutoPredictor(learned, TwinPredictor())
    found, simulated = auto.evaluate(fleet, bins), TwinPredictor().evaluate(fleet, bins)
    assert auto.left_to_twin == 1
    assert found.mean_ttft_ms[0] == simulated.mean_ttft_ms[0]


@pytest.mark.parametrize("bursts", [None, Bursts(0.5, ((30.0, 1.0),))])
def test_trees_lead_searches_of_fleets_with_a_trend(bursts: Bursts | None) -> None:
    """They take the mean rates of the cycle; the twin, which follows the trend, says what holds."""
    known, fleet = load_profile("h100-64gb/llama-3.1-8b-instruct"), random_fleet(6, seed=4)
    changing = Arrivals("bursty" if bursts else "piecewise", period_s=300.0, factors=(1.0, 2.0, 3.0), common=bursts)
    bins = [Bin((0, 1, 2), known.settings(2, 32), known), Bin((3, 4, 5), known.settings(2, 32), known)]
    auto = AutoPredictor.for_profile(known)
    search = auto.for_search()
    found = search.evaluate(fleet.with_arrivals(changing), bins, [1.1, 1.2])
    assert search.left_to_twin == 0
    assert repr(found) == repr(search.evaluate(fleet, bins, [2.2, 2.4]))
    auto.evaluate(fleet.with_arrivals(changing), bins)
    assert auto.left_to_twin == 2


@pytest.mark.parametrize("kind", ["boosting", "forest", "tree"])
@pytest.mark.parametrize("name", ["h100-64gb/llama-3.1-8b-instruct", "h100-64gb/qwen-2.5-7b-instruct"])
def test_shipped_trees_give_no_figure_of_a_server_that_they_never_saw(kind: str, name: str) -> None:
    """Other versions, caching, drafts, priorities and fleets are refused; what the server ignores changes nothing."""
    known = load_profile(name)
    alike = Workload([Adapter(f"a{i}", 8, 0.05, shared_prefix_tokens=128, priority=i % 3) for i in range(6)])
    plain = replace(alike, adapters=tuple(Adapter(each.name, 8, 0.05) for each in alike.adapters))
    drafts = SpeculationSpec("eagle", 2, acceptance=0.5)
    changes: list[dict[str, Any]] = [
        {"prefix_caching": True}, {"async_scheduling": True}, {"version": "0.11.2"}, {"version": "0.33.0"},
        {"version": "0.32.0", "scheduling_policy": "priority"}, {"version": "0.32.0", "speculation": drafts},
        {"version": "0.32.0", "max_num_queued_reqs": 9},
    ]  # fmt: skip
    for change in changes:
        with pytest.raises(PackerError, match="trained"):
            evaluate_server(alike, replace(known, engine=replace(known.engine, **change)), max_loras=4, predictor=kind)
    for fleet in (
        replace(plain, sessions=Sessions(3.0)),
        replace(plain, adapters=(*plain.adapters, Adapter("b", 0, 1.0))),
    ):
        with pytest.raises(IncompatibleError, match="trained without"):
            evaluate_server(fleet, known, max_loras=4, predictor=kind)
    for predictor in (kind, "twin"):
        found = [evaluate_server(fleet, known, max_loras=4, predictor=predictor) for fleet in (alike, plain)]
        assert found[0].mean_ttft_ms == found[1].mean_ttft_ms


def test_a_profile_may_have_a_name_longer_than_a_files() -> None:
    """Many changed settings make a long name, under which no predictor is shipped: another one leads searches."""
    known = load_profile("h100-64gb/llama-3.1-8b-instruct")
    auto = AutoPredictor.for_profile(replace(known, name=f"{known.name} ({'x' * 300})"))
    assert auto.learned is None
    assert auto.guide is not None


def test_the_twin_confirms_a_plan_that_they_led_to(slower: Profile) -> None:
    """Every server of such a plan holds in the twin."""
    plan = solve(random_fleet(60, seed=2, rates=(0.8, 0.4)), slower, seed=3)
    assert plan.verified
    assert plan.evaluations.feasible.all()
    assert plan.n_gpus > 1
