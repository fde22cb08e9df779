"""Independent simulations in parallel threads: kernels release the GIL."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from queue import PriorityQueue
from typing import Any, TypeVar

from packer.progress import Progress, silent

K = TypeVar("K")
T = TypeVar("T")


def in_threads(run: Callable[[K], T], items: Collection[K], jobs: int = -1, progress: Progress = silent) -> Iterator[T]:
    """Yield `run` of each item, in order, as results come; `jobs`: threads, -1 for one per core. If the iterator is
    closed early, running tasks are finished and no others are begun."""
    threads = min(os.cpu_count() or 1 if jobs < 0 else jobs, len(items))
    pool = ThreadPoolExecutor(max(1, threads))
    try:
        results = pool.map(run, items) if threads > 1 else map(run, items)
        for done, found in enumerate(results, start=1):
            progress("simulating", done, len(items))
            yield found
    finally:
        pool.shutdown(cancel_futures=True)


class Workers:
    """Threads (`jobs`, -1: one per core) for independent tasks; those needed now run before later ones."""

    def __init__(self, jobs: int = -1) -> None:
        self.jobs = os.cpu_count() or 1 if jobs < 0 else jobs
        self._threads = ThreadPoolExecutor(self.jobs)
        self._tasks: PriorityQueue[tuple[bool, int, Future[Any], Callable[[], Any]]] = PriorityQueue()
        self._number = count()

    def begin(self, run: Callable[[], T], *, later: bool = False) -> Future[T]:
        """Return the result of a task, which may be cancelled until it runs; `later`: nobody waits for it yet."""
        future: Future[T] = Future()
        self._tasks.put((later, next(self._number), future, run))
        self._threads.submit(self._next)
        return future

    def _next(self) -> None:
        _, _, future, run = self._tasks.get()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(run())
            except BaseException as error:
                future.set_exception(error)
