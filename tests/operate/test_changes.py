from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packer.adapter import Adapter
from packer.arrival import Arrivals, RequestTrace
from packer.errors import InfeasibleError, UnknownNameError, ValidationError
from packer.io.workload_schema import workload_from_dict, workload_to_dict
from packer.io.workloads import table_of
from packer.operate.changes import between, changed_plan
from packer.plan import Plan

Make = Callable[..., Plan]


def test_rates_grow_everywhere(toy_plan: Make) -> None:
    """A factor multiplies every rate and leaves the servers as they are."""
    plan = toy_plan(["a", "b", "c"])
    changed = changed_plan(plan, rate_factor=2.0)
    assert changed.workload.rates.tolist() == [2 * rate for rate in plan.workload.rates.tolist()]
    assert changed.bins == plan.bins


@pytest.mark.parametrize("rate_factor", [0.5, 2.0])
def test_idle_adapters_stay_idle(toy_plan: Make, rate_factor: float) -> None:
    """No multiple of the rate that stands for 0 is written as a rate, nor is a smaller one taken for idle."""
    plan = toy_plan(["a", "b", "c"])
    rates = zip(plan.workload.adapters, (0.0, 2.0, 3e-7), strict=True)
    fleet = replace(plan.workload, adapters=tuple(replace(each, rate=rate) for each, rate in rates))
    found = changed_plan(replace(plan, workload=fleet), rate_factor=rate_factor).workload
    assert found.given_rates.tolist() == [0.0, 2.0 * rate_factor, 3e-7 * rate_factor]
    written = workload_to_dict(found)
    assert [row[2] for row in table_of(found)[1]] == [each["rate"] for each in written["adapters"]]
    assert written["adapters"][0]["rate"] == 0.0
    assert found.fingerprint == workload_from_dict(written).fingerprint


def test_an_empty_server_is_left_out(toy_plan: Make) -> None:
    """Servers that lose their last adapter disappear; the others keep their number."""
    changed = changed_plan(toy_plan(["a", "b"]), remove=["a"])
    assert changed.gpus == (1,)
    assert changed.workload.names == ("b",)
    assert changed.bins[0].adapters == (0,)


def test_newcomers_go_where_least_is_asked(toy_plan: Make) -> None:
    """A new adapter goes to the least loaded server whose slots are large enough; else it stays unplaced."""
    plan = toy_plan(["a", "b", "c"])  # a and c on GPU 0, b on GPU 1
    changed = changed_plan(plan, add=[Adapter("new", 8, 0.1), Adapter("huge", 64, 0.1)])
    assert [changed.workload.names[i] for i in changed.bins[1].adapters] == ["b", "new"]
    assert changed.unplaced == ("huge",)
    assert [item.max_lora_rank for item in changed.bins] == [8, 8]


def test_shares_stay_with_their_adapters(toy_plan: Make) -> None:
    """Removing and adding around a replicated adapter keeps its shares, and a newcomer gets a whole one."""
    plan = toy_plan(["hot", "b", "c"], replicated=True)
    changed = changed_plan(plan, add=[Adapter("new", 8, 0.1)], remove=["b"])
    for before, after in zip(plan.bins, changed.bins, strict=True):
        assert after.shares[0] == before.shares[0]
        assert set(after.shares[1:]) <= {1.0}


def test_a_replayed_trace_keeps_its_requests_with_their_adapters(toy_plan: Make) -> None:
    """Removing an adapter removes its requests; adding one to a trace, which has none of its, is refused."""
    plan = toy_plan(["a", "b", "c"])
    ones = np.ones(6, dtype=np.int64)
    trace = RequestTrace(np.arange(6.0), np.arange(6) % 3, 100 * ones, np.arange(1, 7))
    replayed = replace(plan, workload=plan.workload.with_arrivals(Arrivals("trace", trace=trace)))
    left = changed_plan(replayed, remove=["a"]).workload.arrivals.trace
    assert left is not None
    assert left.adapter.tolist() == [0, 1, 0, 1]
    assert left.output_tokens.tolist() == [2, 3, 5, 6]
    with pytest.raises(ValidationError, match="a trace are replayed"):
        changed_plan(replayed, add=[Adapter("new", 8, 0.1)], remove=["a"])


def test_wrong_names_are_refused(toy_plan: Make) -> None:
    """What isn't there can't go, what is there can't come, and something must be left."""
    plan = toy_plan(["a", "b"])
    with pytest.raises(UnknownNameError, match="'a'"):
        changed_plan(plan, remove=["aa"])
    with pytest.raises(ValidationError, match="already"):
        changed_plan(plan, add=[Adapter("a", 8, 1.0)])
    with pytest.raises(ValidationError, match="at least one"):
        changed_plan(plan, remove=["a", "b"])
    assert changed_plan(plan, add=[Adapter("a", 8, 1.0)], remove=["a"]).workload.names == ("b", "a")


def test_changes_may_be_iterators_and_arrays(toy_plan: Make) -> None:
    """An iterator is not used up by the checks: what it names changes the plan, or is refused."""
    plan = toy_plan(["a", "b", "c"])
    found = changed_plan(plan, add=iter([Adapter("d", 8, 1.0)]), remove=iter("c"), lose=np.array([0]))  # type: ignore[arg-type]
    assert found.workload.names == ("a", "b", "d")
    assert found.gpus == (1,)
    with pytest.raises(UnknownNameError, match="'aa'"):
        changed_plan(plan, remove=iter(["aa"]))  # type: ignore[arg-type]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_every_adapter_has_its_whole_rate(toy_plan: Make, data: st.DataObject) -> None:
    """Whatever changes, the shares of each adapter that has a server sum to 1."""
    count = data.draw(st.integers(2, 9))
    plan = toy_plan([f"a{k}" for k in range(count)], gpus=2, replicated=data.draw(st.booleans()))
    remove = data.draw(st.sets(st.sampled_from(plan.workload.names), max_size=count - 1))
    add = [Adapter(f"n{k}", 8, 0.1) for k in range(data.draw(st.integers(0, 4)))]
    changed = changed_plan(plan, add=add, remove=remove)
    total = dict.fromkeys(range(len(changed.workload)), 0.0)
    for item in changed.bins:
        for i, share in zip(item.adapters, item.shares, strict=True):
            total[i] += share
    for i, name in enumerate(changed.workload.names):
        # A replica goes with the server that only it was on.
        assert total[i] == pytest.approx(1.0) or name in changed.unplaced


def test_adapters_of_a_lost_server_move(toy_plan: Make) -> None:
    """The adapters of a lost server run on the others, under the plan's numbers; without them no plan holds."""
    plan = toy_plan(["a", "b", "c"])  # a and c on GPU 0, b on GPU 1
    changed = changed_plan(plan, lose=[0])
    assert changed.gpus == (1,)
    assert sorted(changed.bins[0].adapters) == [0, 1, 2]
    assert changed.workload == plan.workload
    with pytest.raises(ValidationError, match=r"Expected lost servers among 0 to 1, got server 2\."):
        changed_plan(plan, lose=[2])
    with pytest.raises(InfeasibleError, match="does not hold without its 2 servers: none is left"):
        changed_plan(plan, lose=[0, 1])


def test_servers_go_on_whatever_their_profile_is_called(toy_plan: Make) -> None:
    """A calibration, or another name of the profile, replaces no running server; another engine does."""
    old = toy_plan(["a", "b"])
    profile = replace(old.bins[0].profile, name="calibrated", startup_s=7.0)
    other = replace(profile, engine=replace(profile.engine, block_size=32))
    for own, continues in ((profile, (0, 1)), (other, (None, None))):
        new = replace(old, bins=tuple(replace(item, profile=own) for item in old.bins))
        assert between(old, new).servers == continues
