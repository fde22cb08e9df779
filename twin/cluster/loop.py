"""The event loop, compiled for the engines of a cluster and the score of its router.

The functions of `events` and `state` call functions of engines and routers as globals; copies made here get others.
Plug-in routers and engines are compiled as packer's own are, and cached under the hash of everything they call.
"""

from __future__ import annotations

import types
from functools import cache
from typing import Any, NamedTuple

from numba import njit

from packer.twin.cluster import events, state
from packer.twin.cluster.state import EngineKernels, Servers, law_of_server, run_other
from packer.twin.flags import CALLED, ENGINE_FLAGS, ENTERED, INLINED

_state_of = _advance = _event_s = _next = run_other
_place = _own = 0


class Loop(NamedTuple):
    """Compiled functions: see `events`, and `state` for `run_until`."""

    run_until: Any
    pass_on: Any
    choose: Any
    route: Any


def _engine(c: Servers, s: int, until_s: float, engine: int) -> None:
    """Execute every step of server `s`, which runs this engine, that starts before `until_s`."""
    if engine == _place:
        state = _state_of(c, c.others[_own], s)
        _advance(state, law_of_server(c, s), until_s)
        c.wake_s[s] = _event_s(state)
    else:
        _next(c, s, until_s, engine)


@cache
def loop_of(engines: tuple[EngineKernels, ...], hooks: tuple[tuple[str, Any], ...]) -> Loop:
    """Return the loop for vLLM's engine and `engines` (numbered from 1), with a router's own functions by name."""
    chain: Any = run_other
    for place, kernels in enumerate(engines, start=1):
        chain = _variant(
            _engine, _state_of=kernels.state_of, _advance=kernels.advance, _event_s=kernels.event_s,
            _place=place, _own=place - 1, _next=chain,
        )  # fmt: skip
    run_until, pass_on, waiting, due = state.run_until, events.pass_on, events.next_change_s, events.set_out_s
    if engines:
        run_until = _variant(run_until, ENTERED, run_other=chain)
        run_all_until = _variant(events.run_all_until, CALLED, run_until=run_until)
        pass_on = _variant(pass_on, run_all_until=run_all_until, run_until=run_until)
        waiting = _variant(waiting, INLINED, run_all_until=run_all_until)
        due = _variant(due, INLINED, pass_on=pass_on, next_change_s=waiting)
    route, choose, own = events.route, events.choose, dict(hooks)
    if own:
        choose = _variant(choose, **own)
    if engines or own:
        route = _variant(route, pass_on=pass_on, next_change_s=waiting, choose=choose, set_out_s=due, **own)
    return Loop(run_until, pass_on, choose, route)


def _variant(kernel: Any, flags: dict[str, Any] = ENGINE_FLAGS, **names: Any) -> Any:
    """Return a copy of the kernel, compiled with other values of these global names."""
    function = getattr(kernel, "py_func", kernel)
    copy = types.FunctionType(function.__code__, function.__globals__ | names, function.__name__, function.__defaults__)
    return njit(**flags)(copy)
