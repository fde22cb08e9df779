"""A second process that compiles kernels while this one works; both use the folder of compiled kernels."""

from __future__ import annotations

import atexit
import os
import pickle
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numba
import numpy as np
from numba.core.dispatcher import Dispatcher

from packer.twin.kernel_cache import is_kept
from packer.twin.kernel_folder import keeps

PROGRAM = """
import importlib, pickle, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
from packer.twin.kernel_folder import keeps
while keeps():
    try:
        module, name, signature = pickle.load(sys.stdin.buffer)
    except EOFError:
        break
    getattr(importlib.import_module(module), name).compile(signature)
    print(flush=True)
"""
"""The second process: it writes a line for each compiled kernel, and ends when it can't keep what it compiles."""
POLL_S = 0.02


def types_of(values: Iterable[object]) -> tuple[Any, ...]:
    """Return Numba's types of some values: a signature."""
    return tuple(numba.typeof(value) for value in values)  # type: ignore[no-untyped-call]


class Compiler:
    """The process; it starts with the first kernel and ends with this process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._sent: dict[Dispatcher, int] = {}
        self._done = 0

    def send(self, kernel: Dispatcher, signature: tuple[Any, ...]) -> None:
        """Have a kernel compiled, after those sent before, unless it is compiled already. Nothing happens on a single
        core, if the process could not keep the kernel, or if no process can be started."""
        with self._lock:
            if kernel in self._sent or is_kept(kernel) or (os.cpu_count() or 1) < 2 or not keeps():
                return
            self._sent[kernel] = len(self._sent)
            try:
                if self._process is None:
                    self._process = subprocess.Popen(
                        [sys.executable, "-c", PROGRAM],
                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                    )  # fmt: skip
                    atexit.register(self._process.kill)
                    threading.Thread(target=self._count, daemon=True).start()
                    self._write(sys.path)
                self._write((kernel.py_func.__module__, kernel.py_func.__name__, signature))
            except OSError:  # no process, or it ended
                self._sent.clear()

    def _write(self, message: object) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(pickle.dumps(message))
        self._process.stdin.flush()

    def _count(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for _ in self._process.stdout:
            self._done += 1

    def has(self, kernel: Dispatcher) -> bool:
        """Whether the process is still going to compile a kernel that was sent."""
        running = self._process is not None and self._process.poll() is None
        # Kernels are compiled in the order in which they were sent.
        return running and self._sent.get(kernel, -1) >= self._done and not is_kept(kernel)

    def wait(self, kernel: Dispatcher) -> None:
        """Wait for a kernel as long as the process is still going to compile it."""
        while self.has(kernel):
            time.sleep(POLL_S)


COMPILER = Compiler()


def interpreted(kernel: Dispatcher, instead: Mapping[Dispatcher, Callable[..., Any]]) -> Callable[..., Any]:
    """Return the kernel and all that it calls as Python functions; `instead` replaces some of them."""
    function: Any = getattr(kernel, "py_func", kernel)  # with NUMBA_DISABLE_JIT it is a function already
    names = {"__builtins__": function.__globals__["__builtins__"]}
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, Dispatcher):
            value = instead.get(value) or interpreted(value, instead)
        if value is not None:
            names[name] = value
    return types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)


class Tiered:
    """A kernel that is interpreted while it is being compiled, so that its first calls need not wait.

    Compiling takes seconds; a few calls in Python take milliseconds and give the same numbers.

    `kernel`: one that is always called with the same types.
    `instead`: Python functions that are faster than the interpreted ones, by kernel.
    """

    def __init__(self, kernel: Dispatcher, instead: Mapping[Dispatcher, Callable[..., Any]]) -> None:
        self.kernel = kernel
        self.as_python = interpreted(kernel, instead)

    def __call__(self, *arguments: Any, short: bool) -> None:
        """Run the kernel; a call that is not `short` waits until it is compiled."""
        if not getattr(self.kernel, "overloads", True):
            if short:
                COMPILER.send(self.kernel, types_of(arguments))
                if COMPILER.has(self.kernel):
                    with np.errstate(all="ignore"):  # as in compiled code
                        self.as_python(*arguments)
                    return
            COMPILER.wait(self.kernel)
        self.kernel(*arguments)
