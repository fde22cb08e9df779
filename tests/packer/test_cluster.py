"""Kinds of server, clusters and their checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from packer.cluster import Cluster, ServerKind
from packer.errors import UnknownNameError, ValidationError
from packer.plan import Plan
from packer.profile import Profile


def test_equal_servers_in_one_call(toy_profile: Profile) -> None:
    """`Cluster.of` makes n servers of one kind that may serve every adapter."""
    cluster = Cluster.of(toy_profile, 3, max_loras=4, max_lora_rank=16)
    assert len(cluster) == 3
    assert cluster.kind(2) == ServerKind("toy", toy_profile, 4, 16)
    assert cluster.placement is None


def test_lists_make_an_equal_cluster(toy_profile: Profile) -> None:
    """A cluster of lists, or of what gives its items once, is that of tuples."""
    made = Cluster.of(toy_profile, 2, max_loras=4)
    assert Cluster(list(made.kinds), iter(made.servers), [{"a": 1.0}] * 2) == replace(made, placement=({"a": 1.0},) * 2)


def test_unknown_kind_names_what_exists(toy_profile: Profile) -> None:
    """A server of an unknown kind is refused with the kinds that exist."""
    with pytest.raises(UnknownNameError, match=r"h10.*Known: h100"):
        Cluster((ServerKind("h100", toy_profile, 4),), ("h10",))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"servers": ()}, "at least one server"),
        ({"placement": ({"a": 1.0},)}, "one placement per server"),
        ({"placement": ({"a": 1.5}, {})}, "share of 'a'"),
        ({"slo": {"ttft_ms": 0.0}}, "ttft_ms"),
    ],
)
def test_values_that_break_a_rule(toy_profile: Profile, change: dict[str, object], message: str) -> None:
    """Servers, placements and limits are checked, and the message says the rule."""
    values: dict[str, object] = {"kinds": (ServerKind("k", toy_profile, 4),), "servers": ("k", "k")}
    with pytest.raises(ValidationError, match=message):
        Cluster(**(values | change))  # type: ignore[arg-type]


def test_kinds_have_unique_names(toy_profile: Profile) -> None:
    """Two kinds of one name are refused: servers name their kind."""
    with pytest.raises(ValidationError, match="'k' twice"):
        Cluster((ServerKind("k", toy_profile, 4), ServerKind("k", toy_profile, 8)), ("k",))


def test_unknown_limit_names_what_exists(toy_profile: Profile) -> None:
    """An SLO limits known latencies of a request only."""
    with pytest.raises(UnknownNameError, match="ttft_ms"):
        Cluster((ServerKind("k", toy_profile, 4),), ("k",), slo={"ttft": 5})


def test_cluster_of_a_plan(toy_plan: Callable[..., Plan]) -> None:
    """A plan's cluster has its servers in order, with the shares of replicated adapters."""
    plan = toy_plan(["a", "b", "c", "d"], gpus=2, replicated=True)
    cluster = plan.cluster()
    assert len(cluster) == 2
    assert [cluster.kind(k).max_loras for k in range(2)] == [b.max_loras for b in plan.bins]
    assert cluster.placement == (
        {"a": pytest.approx(1 / 3), "c": 1.0},
        {"a": pytest.approx(2 / 3), "b": 1.0, "d": 1.0},
    )


def test_servers_that_differ_are_different_kinds(toy_plan: Callable[..., Plan]) -> None:
    """Bins with different slots are different kinds of server, equal ones share a kind."""
    plan = toy_plan(["a", "b", "c", "d", "e", "f", "g"], gpus=3)
    assert [b.max_loras for b in plan.bins] == [3, 2, 2]
    assert len(plan.cluster().kinds) == 2
