"""Workloads: the fleet and its algebra."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packer.adapter import Adapter
from packer.arrival import Arrivals, RequestTrace
from packer.errors import ValidationError
from packer.lengths import Lengths
from packer.predictors.api import evaluate_server
from packer.sessions import Sessions
from packer.testing.analytic import AnalyticPredictor, small_profile
from packer.twin.simulate import simulate
from packer.workload import Workload

rates = st.lists(st.floats(1e-3, 10.0), min_size=1, max_size=12)


def fleet(values: list[float]) -> Workload:
    return Workload(
        [Adapter(f"a{k}", 8, rate, Lengths.gamma(100.0 + k, 1.0) if k % 2 else None) for k, rate in enumerate(values)]
    )


@given(values=rates)
@settings(deadline=None)
def test_offered_load_adds_up(values: list[float]) -> None:
    """The offered load is Σ rate × (mean input + mean output), and a partition keeps it."""
    whole = fleet(values)
    by_hand = sum(
        a.rate * ((a.input_tokens or whole.input_tokens).expected + whole.output_tokens.expected)
        for a in whole.adapters
    )
    assert whole.offered_tok_s == pytest.approx(by_hand)
    evens, odds = list(range(0, len(whole), 2)), list(range(1, len(whole), 2))
    parts = whole.subset(evens).offered_tok_s + (whole.subset(odds).offered_tok_s if odds else 0.0)
    assert parts == pytest.approx(whole.offered_tok_s)


@given(values=rates, share=st.floats(0.01, 0.99))
def test_shares_of_an_adapter_add_up(values: list[float], share: float) -> None:
    """Two replicas with complementary shares carry the adapter's whole load."""
    whole = fleet(values)
    index = list(range(len(whole)))
    loads = [whole.subset(index, [part] * len(index)).offered_tok_s for part in (share, 1.0 - share)]
    assert sum(loads) == pytest.approx(whole.offered_tok_s)


@given(values=rates, factor=st.floats(0.1, 10.0))
def test_scaling_multiplies_the_load(values: list[float], factor: float) -> None:
    """A rate factor multiplies the offered load and changes nothing else."""
    whole = fleet(values)
    scaled = whole.scaled(factor)
    assert scaled.offered_tok_s == pytest.approx(factor * whole.offered_tok_s)
    assert (scaled.names, scaled.input_tokens) == (whole.names, whole.input_tokens)


def test_columns_are_read_only() -> None:
    """A fleet can't be changed through its arrays."""
    for column in (fleet([1.0]).rates, fleet([1.0]).ranks, fleet([1.0]).mean_input_tokens):
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 1


def test_nonsense_is_refused() -> None:
    """A fleet has at least one adapter, unique names and a correlation in [-1, 1]."""
    with pytest.raises(ValidationError, match="at least one adapter"):
        Workload([])
    with pytest.raises(ValidationError, match="'a' twice"):
        Workload([Adapter("a", 8, 0.1), Adapter("a", 16, 0.2)])
    with pytest.raises(ValidationError, match="length_correlation"):
        Workload([Adapter("a", 8, 0.1)], length_correlation=1.5)
    with pytest.raises(ValidationError, match="rate_factor"):
        fleet([1.0]).scaled(0.0)


@pytest.mark.parametrize("part", ["input_tokens", "output_tokens", "arrivals", "slo", "fine_tuning"])
def test_parts_of_another_kind_are_refused(part: str) -> None:
    """A number in place of a distribution or a process is refused where it is given, with what to write."""
    own: dict[str, Any] = {part: 300.0}
    with pytest.raises(ValidationError, match=f"Expected {part} to be an? .*, as packer.* gives, got 300.0"):
        Workload([Adapter("a", 8, 0.1)], **own)
    if part.endswith("tokens"):
        with pytest.raises(ValidationError, match=f"Expected {part} of adapter 'a' to be a Lengths"):
            Adapter("a", 8, 0.1, **own)


def replayed(n: int = 100) -> Workload:
    rng = np.random.default_rng(3)
    trace = RequestTrace(
        np.sort(rng.uniform(0, 10, n)), rng.integers(0, 3, n), rng.integers(1, 9, n), rng.integers(1, 9, n)
    )
    return fleet([1.0, 1.0, 1.0]).with_arrivals(Arrivals("trace", trace=trace))


def test_a_subset_replays_only_its_requests() -> None:
    """A bin gets the requests of its adapters, renumbered to its own order."""
    whole = replayed()
    part = whole.subset([2, 0])
    trace, inner = whole.arrivals.trace, part.arrivals.trace
    assert trace is not None
    assert inner is not None
    for position, index in enumerate((2, 0)):
        assert np.array_equal(inner.time_s[inner.adapter == position], trace.time_s[trace.adapter == index])


@given(share=st.floats(0.01, 0.99))
def test_a_share_of_a_trace_keeps_that_part(share: float) -> None:
    """A replica with a share of an adapter replays that part of its requests, to within one."""
    whole = replayed()
    trace, inner = whole.arrivals.trace, whole.subset([1], [share]).arrivals.trace
    assert trace is not None
    assert inner is not None
    assert abs(len(inner) - share * (trace.adapter == 1).sum()) <= 1.0


def test_a_trace_must_fit_its_fleet() -> None:
    """A trace that names an adapter the fleet hasn't is refused."""
    with pytest.raises(ValidationError, match="< 2"):
        fleet([1.0, 1.0]).with_arrivals(replayed().arrivals)


def test_a_fleet_at_other_rates_is_the_fleet_made_anew() -> None:
    """A scaled fleet is one made of adapters of these rates, with the same columns."""
    whole = fleet([0.5, 2.0, 0.25])
    known = whole.names, whole.ranks, whole.mean_tokens
    scaled = whole.scaled(1.5)
    made = replace(whole, adapters=tuple(replace(each, rate=each.rate * 1.5) for each in whole.adapters))
    assert scaled == made
    assert scaled.fingerprint == made.fingerprint
    np.testing.assert_array_equal(scaled.offered_tok_s_by_adapter, made.offered_tok_s_by_adapter)
    assert (whole.names, whole.ranks, whole.mean_tokens) == known


@pytest.mark.parametrize(("rate", "factor"), [(1e6, 1.0404), (1e-12, 0.5), (1e6, 1e-300)])
def test_a_scaled_rate_may_leave_the_range_of_given_rates(rate: float, factor: float) -> None:
    """A rate that no user gave is any finite number above 0, also where sessions and prefixes are taken out."""
    scaled = Workload([Adapter("a", 8, rate, shared_prefix_tokens=10, sessions=Sessions(turns=4))]).scaled(factor)
    assert scaled.rate == scaled.as_independent(cached=True).rate == rate * factor
    own = scaled.as_independent(cached=True)
    assert simulate(own, small_profile(), max_loras=1, duration_s=1e-3).status == "ok"


@pytest.mark.parametrize("factor", [1e308, 1e-323])
def test_a_scaled_rate_is_finite_and_above_zero(factor: float) -> None:
    """A factor that overflows a rate, or leaves nothing of it, is refused with the adapter's name."""
    whole = fleet([4.0 if factor > 1.0 else 1e-3])
    with pytest.raises(ValidationError, match="the rate of adapter 'a0'"):
        whole.scaled(factor)


def test_a_trace_scaled_comes_faster() -> None:
    """At twice the rates the same requests come in half the time; a part of a trace ends when the whole does."""
    whole = replayed()
    before, after = whole.arrivals.trace, whole.scaled(2.0).arrivals.trace
    assert before is not None
    assert after is not None
    np.testing.assert_allclose(after.time_s, before.time_s / 2)
    assert after.span_s == before.span_s / 2
    part = whole.subset([0]).arrivals.trace
    assert part is not None
    assert part.span_s == before.span_s
    np.testing.assert_allclose(whole.scaled(2.0).rates, 2 * whole.rates)


def test_lengths_that_nobody_gave_are_known_as_such() -> None:
    """A fleet says whether it stands on default lengths, so that every output can say it."""
    bare = Workload([Adapter("a", 8, 0.1)])
    assert bare.assumed_lengths
    given = Lengths.constant(10)
    assert not Workload([Adapter("a", 8, 0.1)], given, given).assumed_lengths
    assert not Workload([Adapter("a", 8, 0.1, given, given)]).assumed_lengths
    assert Workload([Adapter("a", 8, 0.1, given)]).assumed_lengths == ("output_tokens",)
    some = Workload([Adapter("a", 8, 0.1, given, given), Adapter("b", 8, 0.1, given)])
    assert (some.assumed_lengths, some.assuming, bare.assuming) == (("output_tokens",), 1, 1)


def test_equal_fleets_are_one_key_without_a_look_at_each_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hours of a fleet are keys of many tables: its hash is that of an equal fleet, and reads no adapter twice."""
    adapters = [Adapter("a", 8, 0.1), Adapter("b", 16, 0.2)]
    one, same, other = Workload(adapters), Workload(adapters), Workload(adapters).scaled(2.0)
    assert {one: 1}[same] == 1
    assert other not in {one}
    monkeypatch.setattr(Adapter, "__hash__", lambda _self: pytest.fail("an adapter was hashed"))
    assert hash(one) == hash(same)


def test_models_are_named_by_all_or_none() -> None:
    """An adapter without a base model in a fleet that has several could be placed on a wrong server."""
    both = Workload([Adapter("a", 8, 1.0, model="llama"), Adapter("b", 8, 1.0, model="qwen")])
    assert both.models == ("llama", "qwen")
    assert both.subset([1]).models == ("qwen",)
    assert Workload([Adapter("a", 8, 1.0)]).models == ()
    with pytest.raises(ValidationError, match="every adapter to name its base model, or none, got 'b' without"):
        Workload([Adapter("a", 8, 1.0, model="llama"), Adapter("b", 8, 1.0)])
    with pytest.raises(ValidationError, match="the model of adapter 'a'"):
        Adapter("a", 8, 1.0, model="")


def test_slots_hold_every_adapter() -> None:
    """The rank of slots is the smallest of vLLM's that holds every adapter, or a given one that does."""
    two = Workload([Adapter("a", 8, 0.1), Adapter("b", 24, 0.1)])
    assert two.slot_rank() == 32
    assert two.slot_rank(64) == 64
    with pytest.raises(ValidationError, match=r"max_lora_rank >= the largest rank, 24, got 16"):
        two.slot_rank(16)
    with pytest.raises(ValidationError, match=r"max_lora_rank to be one of .*, got 48"):
        two.slot_rank(48)
    with pytest.raises(ValidationError, match="the largest rank, 24"):
        evaluate_server(two, small_profile(), max_loras=2, max_lora_rank=16, predictor=AnalyticPredictor())


@pytest.mark.parametrize("wrong", [None, 3, Adapter("a", 8, 1.0)])
def test_adapters_come_in_a_list(wrong: object) -> None:
    """What is no list of adapters is refused with the rule, an adapter by itself, too."""
    with pytest.raises(ValidationError, match=r"Expected a list of packer\.Adapter for a workload, got"):
        Workload(wrong)  # type: ignore[arg-type]


def test_other_arrivals_are_checked_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each server of a cluster has the fleet with its own requests: thousands of adapters are not checked for each."""
    fleet = Workload([Adapter("a", 8, 1.0), Adapter("b", 0, 2.0)], name="mine")
    monkeypatch.setattr(Workload, "_check_adapters", lambda self: pytest.fail("checked again"))
    bursty = Arrivals("lognormal", cv=2.0)
    assert vars(fleet.with_arrivals(bursty)) == {**vars(fleet), "arrivals": bursty}
    with pytest.raises(ValidationError, match="arrivals"):
        fleet.with_arrivals("poisson")  # type: ignore[arg-type]
