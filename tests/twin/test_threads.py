"""Runs in threads come in the order of their items, and none is begun once no more are taken."""

from __future__ import annotations

import threading

import pytest

from packer.twin.threads import Workers, in_threads


@pytest.mark.parametrize("jobs", [1, 4])
def test_results_come_in_order(jobs: int) -> None:
    """However long each takes, and progress counts them as they are taken."""
    first = threading.Event()
    seen: list[tuple[str, int, int]] = []

    def run(k: int) -> int:
        if k == 0 and jobs > 1:
            first.wait(10.0)
        elif k == 2:
            first.set()
        return k * k

    progress = lambda what, done, total: seen.append((what, done, total))  # noqa: E731
    assert list(in_threads(run, range(5), jobs, progress)) == [0, 1, 4, 9, 16]
    assert seen == [("simulating", k, 5) for k in range(1, 6)]


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_is_closed_begins_nothing_else(jobs: int) -> None:
    """Long work can be stopped."""
    begun: list[int] = []
    hold = threading.Event()

    def run(k: int) -> int:
        begun.append(k)
        if k > 0:
            hold.wait(10.0)
        return k

    results = in_threads(run, range(50), jobs)
    assert next(results) == 0
    threading.Timer(0.05, hold.set).start()
    results.close()
    assert len(begun) <= 1 + jobs


def test_errors_are_those_of_the_run() -> None:
    """The first error ends the runs."""
    with pytest.raises(ZeroDivisionError):
        list(in_threads(lambda k: 1 // k, [1, 0, 2], 2))


def test_what_is_needed_now_comes_before_what_may_be_needed() -> None:
    """Tasks for later wait for those that were begun after them, may be cancelled, and hand on their errors."""
    hold, order, workers = threading.Event(), [], Workers(1)
    first = workers.begin(lambda: hold.wait(10.0))
    later, never = (workers.begin(lambda k=k: order.append(k), later=True) for k in (1, 2))
    broken = workers.begin(lambda: 1 // 0)
    now = workers.begin(lambda: order.append(0))
    assert never.cancel()
    hold.set()
    assert first.result() and (now.result(), later.result()) == (None, None)  # noqa: PT018
    with pytest.raises(ZeroDivisionError):
        broken.result()
    assert order == [0, 1]
