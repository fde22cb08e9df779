"""Compile the engine in two processes at once: some of its parts in each, then `advance` around them."""

from __future__ import annotations

import inspect
import threading
from functools import cache
from typing import Any

import numpy as np
from numba.core.dispatcher import Dispatcher

from packer.twin.compile_ahead import COMPILER, types_of
from packer.twin.engine.state import adapters_of, new_state
from packer.twin.engine.admit import admit
from packer.twin.engine.advance import advance
from packer.twin.engine.arrive import arrive
from packer.twin.engine.charge import charge, planned_ms
from packer.twin.engine.emit import emit, turn
from packer.twin.engine.schedule import schedule_running
from packer.twin.kernel_cache import is_kept, load
from packer.twin.law.law import FRONTEND, Law

HERE, ELSEWHERE = (arrive, admit, schedule_running), (turn, emit, planned_ms, charge)
"""The parts, split so that both processes take about as long: the other one starts later and compiles trees next."""


def signature(part: Dispatcher) -> tuple[Any, ...]:
    """Numba's types of the parameters of a part; each has the name of the value that `advance` passes."""
    ones = np.ones(1, dtype=np.int64)
    settings = {"slots": 1, "block_size": 16, "ring": 3, "run_s": 1.0, "bin_s": 1.0}
    state = new_state(1, *adapters_of(ones, ones), settings)
    law = Law(np.ones(1), np.ones(1), np.ones(1), np.ones(1, dtype=FRONTEND)[0])
    values: dict[str, Any] = dict.fromkeys(("pool", "each", "tuning")) | dict.fromkeys(("until_s", "now", "ms"), 0.0)
    values |= {"state": state, "law": law, "ahead": False}
    values |= state._asdict() | law._asdict()
    return types_of(values[name] for name in inspect.signature(part.py_func).parameters)


def is_compiled() -> bool:
    """Whether the engine need not be compiled any more."""
    return is_kept(advance) or bool(advance.overloads)


@cache
def begin() -> None:
    """Start compiling in another process; if the engine is compiled, load it in a thread."""
    if not is_compiled():
        for part in ELSEWHERE:
            COMPILER.send(part, signature(part))
    elif isinstance(advance, Dispatcher) and is_kept(advance):
        threading.Thread(target=lambda: load(advance, signature(advance)), daemon=True).start()


def prepare() -> None:
    """Compile the parts before `advance` needs them, if the other process compiles its share."""
    begin()
    if any(COMPILER.has(part) for part in ELSEWHERE):
        for part in HERE:
            part.compile(signature(part))
        for part in ELSEWHERE:
            COMPILER.wait(part)
