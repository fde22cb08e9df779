"""Independent simulations side by side in threads: kernels release the GIL."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

K = TypeVar("K")
T = TypeVar("T")


def in_threads(
    run: Callable[[K], T],
    items: Collection[K],
    jobs: int = -1,
    progress: Callable[[str, int, int], None] = lambda _what, _done, _total: None,
) -> Iterator[T]:
    """`run` of each item, in order, as they come; `jobs`: threads, -1 for one per core.

    Closed early, what runs is finished and nothing else is begun.
    """
    threads = min(os.cpu_count() or 1 if jobs < 0 else jobs, len(items))
    pool = ThreadPoolExecutor(max(1, threads))
    try:
        results = pool.map(run, items) if threads > 1 else map(run, items)
        for done, found in enumerate(results, start=1):
            progress("simulating", done, len(items))
            yield found
    finally:
        pool.shutdown(cancel_futures=True)
