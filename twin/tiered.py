"""A kernel whose first calls need not wait until it is compiled.

Compiling takes seconds, a few calls as Python take milliseconds: while another process compiles the kernel, short
calls run the Python functions that it is made of, which give the same numbers.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numba.core.dispatcher import Dispatcher

from packer.twin.compile_ahead import COMPILER, types_of


def interpreted(kernel: Dispatcher, instead: Mapping[Dispatcher, Callable[..., Any]]) -> Callable[..., Any]:
    """The kernel and all that it calls as Python functions; `instead` replaces some of them."""
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
    """A kernel that is interpreted while it is being compiled.

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
