"""Rules of autoscalers: how many servers each wants, by the sources that the module names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from packer.operate.autoscalers import Autoscaler, Rule


def view(on: str, used: float = 0.0, waiting: int = 0, running: int = 0) -> Any:
    """A cluster of these servers ("+" runs), each with this state."""
    n = len(on)
    return SimpleNamespace(
        on=np.array([each == "+" for each in on]), used_share=np.full(n, used), waiting=np.full(n, waiting),
        running=np.full(n, running),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("used", "starts", "stops"), [(0.95, (2,), ()), (0.9, (), ()), (0.5, (), ()), (0.45, (), (1,))]
)
def test_one_server_more_or_less_by_the_kv_cache(used: float, starts: tuple[int, ...], stops: tuple[int, ...]) -> None:
    """Above 0.9 one more, below 0.5 one less, nothing at the first look."""
    scaler = Autoscaler("kv", 1.0, 2)
    assert list(scaler.act(0.0, view("++--", used))) == []
    made = list(scaler.act(180.0, view("++--", used)))
    assert tuple(s for change in made for s in change.start) == starts
    assert tuple(s for change in made for s in change.stop) == stops


def test_a_cluster_without_a_ready_server_keeps_what_it_wants() -> None:
    """There is no KV cache to look at: lost servers are started again, no more and no fewer."""
    scaler = Autoscaler("kv", 1.0, 2)
    scaler.act(0.0, view("++--", 0.95))
    (change,) = scaler.act(180.0, view("----"))
    assert len(change.start) == 2


@pytest.mark.parametrize(("rule", "wanted"), [("queue", 2), ("concurrency", 4)])
def test_servers_for_the_sum_over_the_target(rule: Rule, wanted: int) -> None:
    """ceil(sum / target): waiting requests of all servers, or those that run as well."""
    scaler = Autoscaler(rule, 5.0, 1)
    (change,) = scaler.act(0.0, view("+-----", waiting=1, running=2))
    assert 1 + len(change.start) == wanted


def test_fewer_servers_only_after_five_quiet_minutes() -> None:
    """Scale-down takes the largest number of the last 300 s."""
    scaler = Autoscaler("queue", 5.0, 1)
    scaler.act(0.0, view("+--", waiting=5))
    assert list(scaler.act(300.0, view("+++"))) == []
    (change,) = scaler.act(301.0, view("+++"))
    assert change.stop == (1, 2)


def test_a_worker_more_by_the_kv_cache_has_three_intervals_of_grace() -> None:
    """After a start nothing is stopped for three intervals, the first of which sees another number of workers."""
    scaler = Autoscaler("kv", 1.0, 1)
    scaler.act(0.0, view("+--", 0.95))
    (change,) = scaler.act(180.0, view("+--", 0.95))
    assert change.start == (1,)
    stops = {at_s: list(scaler.act(at_s, view("++-", 0.1))) for at_s in (360.0, 540.0, 720.0, 900.0)}
    assert [at_s for at_s, made in stops.items() if made] == [900.0]


def test_waiting_requests_count_as_kv_cache() -> None:
    """Each adds 0.02 to the usage of a worker that runs something."""
    scaler = Autoscaler("kv", 1.0, 1)
    scaler.act(0.0, view("+-", 0.8, waiting=10, running=1))
    (change,) = scaler.act(180.0, view("+-", 0.8, waiting=10, running=1))
    assert change.start == (1,)
