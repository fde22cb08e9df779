"""Service-level objectives: limits by class, read from text, per adapter."""

from __future__ import annotations

from dataclasses import replace

import pytest

from packer.adapter import Adapter
from packer.errors import ValidationError
from packer.goal import Goal, Limits, Slo
from packer.workload import Workload


def test_texts_change_what_they_name() -> None:
    """A class takes what it does not name from adapters without a class, in whatever order the texts come."""
    slo = Slo().parsed(["chat:mean_itl_ms=50", "p95_ttft_ms=500,adapter_share=0.95"])
    assert slo == Slo(Limits(500.0, 100.0), (("chat", Limits(500.0, 50.0)),), 0.95)
    assert slo.parsed(["chat:p95_ttft_ms=200"]).classes == (("chat", Limits(200.0, 50.0)),)
    assert Slo().parsed([]) == Slo().parsed([""]) == Slo()


@pytest.mark.parametrize(
    "text",
    ["mean_itl=50", "p95_ttft_ms", "p95_ttft_ms=x", "p95_ttft_ms=0", "a:adapter_share=0.5", ":mean_itl_ms=5",
     "adapter_share=0", "adapter_share=1.5", "mean_itl_ms=nan", "p95_ttft_ms=1,p95_ttft_ms=2", "ttft_ms=1,ttft_ms=1"],
)  # fmt: skip
def test_other_texts_are_refused(text: str) -> None:
    """Anything but KEY=VALUE with a known key and a value in its range is refused with the rule."""
    with pytest.raises(ValidationError, match="Expected"):
        Slo().parsed([text])


@pytest.mark.parametrize(
    ("key", "meant"), [("ttft_p95_ms", "p95_ttft_ms"), ("p98_ttft_ms", "p99_ttft_ms"), ("itl_mean_ms", "mean_itl_ms")]
)
def test_the_key_that_is_meant_is_suggested(key: str, meant: str) -> None:
    """A key with the right words in another order is that key, though another one is spelled more alike."""
    with pytest.raises(ValidationError, match=rf"Did you mean {meant}\?"):
        Slo().parsed([f"{key}=500"])


@pytest.mark.parametrize("value", [None, 5, {"p95_ttft_ms": 5.0}, ["p95_ttft_ms=5"], b"p95_ttft_ms=5"])
def test_a_goal_is_read_from_text_alone(value: object) -> None:
    """Anything else is refused with the rule."""
    with pytest.raises(ValidationError, match="Expected a goal to be a str"):
        Slo.parse(value)  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="Expected a goal to be a str"):
        Workload([Adapter("a", 8, 1.0)]).held_to((value,))  # type: ignore[arg-type]


def test_a_key_says_where_its_limit_counts() -> None:
    """Statistics count for adapters, gaps' quantiles and `server.` for servers, plain names for each request."""
    goal = Slo().parsed(["p99_ttft_ms=900,server.mean_ttft_ms=300,p99_itl_ms=80,e2e_ms=9000,request_share=0.9"])
    assert goal.keys("adapter") == ("p99_ttft_ms",)
    assert goal.keys("server") == ("p99_itl_ms", "server.mean_ttft_ms")
    assert goal.keys("request") == ("e2e_ms",)
    assert str(goal) == (
        "p99 TTFT <= 900 ms for every adapter; latency of a request <= 9 s for 90 % of the requests; "
        "p99 ITL of a server <= 80 ms and mean TTFT of a server <= 300 ms"
    )
    with pytest.raises(ValidationError, match="limits of servers outside of classes"):
        Slo(classes=(("chat", Limits.only({"server.mean_ttft_ms": 5.0})),))


def test_a_default_gives_way_to_other_limits_of_its_metric() -> None:
    """The usual limit of TTFT goes where another one of TTFT is named, and stays where it is named, too."""
    assert Slo.parse("p99_ttft_ms=900").limits.to_dict() == {"mean_itl_ms": 100.0, "p99_ttft_ms": 900.0}
    assert Slo.parse("ttft_ms=900,tpot_ms=50").limits.to_dict() == {"ttft_ms": 900.0, "tpot_ms": 50.0}
    both = {"p95_ttft_ms": 2000.0, "p99_ttft_ms": 4000.0, "mean_itl_ms": 100.0}
    assert Slo.parse("p99_ttft_ms=4000,p95_ttft_ms=2000").limits.to_dict() == both
    assert Slo.of(500.0).parsed(["p99_ttft_ms=900"]).limits.p95_ttft_ms == 500.0
    assert Slo.parse("none").limits.to_dict() == {}
    assert str(Slo.parse("none")) == "no latency limits"


def test_a_goal_is_taken_in_any_form() -> None:
    """An object as it is, a text changes the fleet's goal, a mapping is the whole goal; old spellings are known."""
    own = Slo.of(500.0, 50.0)
    assert own.changed_by(None) == own.changed_by(own) == own
    assert own.changed_by("mean_itl_ms=20; chat:p95_ttft_ms=100") == Slo(
        Limits(500.0, 20.0),
        {"chat": Limits(100.0, 20.0)},  # type: ignore[arg-type]
    )
    assert own.changed_by({"latency_ms": 800}).limits.to_dict() == {"e2e_ms": 800.0}
    with pytest.raises(ValidationError, match="Expected slo to be a Goal"):
        own.changed_by(5.0)  # type: ignore[arg-type]


def test_limits_of_each_adapter() -> None:
    """Adapters of a class get its limits, the others the plain ones; a class without limits is an error."""
    fleet = Workload([Adapter("a", 8, 1.0), Adapter("b", 8, 1.0, slo_class="batch")])
    with pytest.raises(ValidationError, match=r"'batch' of adapter 'b'.*--slo batch:"):
        fleet.slo.check(fleet)
    slo = Slo(Limits(300.0, 40.0)).parsed(["batch:p95_ttft_ms=60000"])
    slo.check(fleet)
    fleet.slo.parsed(["none"]).check(fleet)  # no limits for anyone
    with pytest.raises(ValidationError, match="'batch' of adapter 'b'"):
        fleet.slo.parsed(["none; p95_ttft_ms=300"]).check(fleet)
    ttft_ms, itl_ms = slo.columns(fleet)
    assert ttft_ms.tolist() == [300.0, 60000.0]
    assert itl_ms.tolist() == [40.0, 40.0]


def test_limits_of_a_class_that_no_adapter_has_are_refused() -> None:
    """A fleet takes limits for the classes of its adapters, and keeps those that it was made with."""
    fleet = Workload([Adapter("a", 8, 1.0), Adapter("b", 8, 1.0, slo_class="batch")])
    with pytest.raises(ValidationError, match=r"slo_class of the fleet \('batch'\), got 'zz'"):
        fleet.held_to(("batch:mean_itl_ms=50", "zz:mean_itl_ms=50"))
    held = fleet.held_to("batch:mean_itl_ms=50")
    assert dict(held.slo.classes)["batch"].mean_itl_ms == 50.0
    assert held.subset([0]).held_to("p95_ttft_ms=300").slo.limits.p95_ttft_ms == 300.0
    assert fleet.held_to(None) is fleet
    with pytest.raises(ValidationError, match="'batch' of adapter 'b'"):
        fleet.held_to("p95_ttft_ms=300")
    with pytest.raises(ValidationError, match=r"\(none\)"):
        Workload([Adapter("a", 8, 1.0)]).held_to("zz:mean_itl_ms=50")


def test_a_workload_keeps_its_limits() -> None:
    """Parts and scaled versions of a fleet have its limits; so has the fingerprint, and the default changes nothing."""
    fleet = Workload([Adapter("a", 8, 1.0), Adapter("b", 8, 2.0)])
    strict = replace(fleet, slo=Slo.of(300.0))
    assert strict.subset([1]).slo == strict.scaled(2.0).slo == Slo.of(300.0)
    assert strict.fingerprint != fleet.fingerprint
    assert str(strict.slo) == "p95 TTFT <= 300 ms and mean ITL <= 100 ms for every adapter"


def test_a_goal_without_limits_is_none() -> None:
    """ "none" leaves nothing, a class with limits of its own leaves something."""
    assert Goal().parsed(["none"]).is_none
    assert not Goal().is_none
    assert not Goal(limits=Limits.only({}), classes=(("chat", Limits(500.0, 40.0)),)).is_none


def test_limits_that_differ_little_share_a_place_in_the_order() -> None:
    """From tight to wide, by ITL. Of more than four different limits those that are nearest in ratio are one kind, so
    that adapters with many limits are separated, too."""
    limits = {"e": 200, "a": 10, "d": 52, "c": 50, "b": 25, "none": 1e9}
    fleet = Workload([Adapter(name, 8, 1.0, slo_class=name) for name in limits])
    goal = Goal().parsed([f"{name}:mean_itl_ms={value}" for name, value in limits.items()])
    assert goal.order(fleet).tolist() == [2, 0, 1, 1, 1, 3]
    assert Goal().order(fleet).tolist() == [0] * 6


def test_limits_of_a_goal_are_limits() -> None:
    """A mapping as limits is refused when the goal is made, not where the goal is first used."""
    with pytest.raises(ValidationError, match=r"Expected limits to be a Limits, as packer\.Limits"):
        Goal({"p95_ttft_ms": 500.0})  # type: ignore[arg-type]
