"""Which running server becomes which server of a plan, and why a server fits none of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from packer.bin import Bin
from packer.errors import IncompatibleError, LiveError, shown
from packer.gpu import base_model
from packer.live.host import Models, each_of
from packer.live.metrics import page_of
from packer.words import counted, listed

if TYPE_CHECKING:
    from packer.live.act import Acting


def goal_of(acting: Acting, seen: Sequence[Models | str], *, prune: bool = False) -> list[dict[str, float]]:
    """Return the plan's placement on the servers, matched so that as many adapters as possible stay.

    `seen`: what each server serves, or why it does not answer. `prune`: adapters that the plan does not name take no
    room.
    Raises `IncompatibleError`: there are fewer servers than in the plan, or none fits a server of the plan;
    `LiveError`: none fits, and one does not answer.
    """
    from scipy.optimize import linear_sum_assignment

    bins, names = acting.plan.bins, acting.plan.workload.names
    if len(bins) > len(acting.servers):
        needed = f"{counted(len(bins), 'server')}, as the plan has"
        raise IncompatibleError(f"Expected at least {needed}, got {len(acting.servers)}.")
    weight = np.full((len(bins), len(acting.servers)), -math.inf)
    reasons: list[list[str]] = [[] for _ in bins]
    placed, slots = {names[i] for item in bins for i in item.adapters}, _slots_of(acting, seen)
    for k, item in enumerate(bins):
        wanted = {names[i] for i in item.adapters}
        for s, models in enumerate(seen):
            if isinstance(models, str):
                reasons[k].append(models.rstrip("."))
                continue
            staying = set() if prune else models.adapters.keys() - placed
            why = _misfit(acting, item, s, models, slots[s]) or _crowded(acting, s, wanted, staying)
            if why:
                reasons[k].append(why)
            else:
                weight[k, s] = len(wanted & set(models.adapters)) + (1e-3 if s == k else 0.0)
    # Servers that do not fit cost more than all adapters together.
    rows, columns = linear_sum_assignment(-np.where(np.isneginf(weight), -1e9, weight))
    found: list[dict[str, float]] = [{} if isinstance(each, str) else dict.fromkeys(acting.base, 0.0) for each in seen]
    for k, s in zip(rows.tolist(), columns.tolist(), strict=True):
        if math.isinf(weight[k, s]):
            failed = LiveError if any(isinstance(each, str) for each in seen) else IncompatibleError
            raise failed(f"No server fits number {k} of the plan: {listed(reasons[k], 3)}.")
        shares = zip(bins[k].adapters, bins[k].shares, strict=True)
        found[s] |= {names[i]: share for i, share in shares}
    return found


def fitting(acting: Acting, seen: Sequence[Models | str]) -> dict[int, int | str]:
    """Plan's server with most common adapters for each that answers, or why it fits none."""
    bins, names, slots = acting.plan.bins, acting.plan.workload.names, _slots_of(acting, seen)
    found = dict[int, int | str]()
    for s, models in enumerate(seen):
        if isinstance(models, str):
            continue
        # The rank that a server takes is not seen: among equals, the largest.
        rows = [
            (-sum(names[i] in models.adapters for i in item.adapters), k != s, -item.max_lora_rank, k)
            for k, item in enumerate(bins)
        ]
        why = {k: _misfit(acting, bins[k], s, models, slots[s]) for *_, k in sorted(rows)}
        fits = next((k for k, reason in why.items() if reason is None), None)
        found[s] = f"Server {s} does not fit the plan: {next(iter(why.values()))}." if fits is None else fits
    return found


def planned_routes(acting: Acting, seen: Sequence[Models | str]) -> dict[str, dict[str, float]]:
    """By server, the adapters that it holds with the shares of the plan's server that it fits; they sum to 1."""
    bins, names = acting.plan.bins, acting.plan.workload.names
    found, total = dict[str, dict[str, float]](), Counter[str]()
    for s, k in fitting(acting, seen).items():
        models = seen[s]
        if isinstance(models, str) or isinstance(k, str):
            continue
        shares, held = zip(bins[k].adapters, bins[k].shares, strict=True), {*models.adapters, *acting.base}
        found[acting.servers[s].name] = own = {names[i]: share for i, share in shares if names[i] in held}
        total.update(own)
    return {server: {name: share / total[name] for name, share in own.items()} for server, own in found.items()}


def by_others(acting: Acting, seen: Sequence[Models | str], servers: Iterable[int]) -> list[str]:
    """Which adapters came to these servers, or left them, since packer wrote its state, in words."""
    found, base = [], acting.base
    for s in servers:
        server, models = acting.servers[s], seen[s]
        known = acting.state.servers.get(server.name)
        if known is None or isinstance(models, str):
            continue
        now, was = models.adapters.keys() - base, known.keys() - base
        both = ((now - was, "came"), (was - now, "left"))
        if parts := [f"{listed([shown(n) for n in sorted(own)], 3)} {what}" for own, what in both if own]:
            found.append(f"{server.name} does not hold what packer left there: {', '.join(parts)}")
    return found


def _slots_of(acting: Acting, seen: Sequence[Models | str]) -> dict[int, int | None]:
    """`max_loras` of the servers that answer; None for those that do not say it."""
    there = [s for s, models in enumerate(seen) if not isinstance(models, str)]
    found = each_of([acting.servers[s] for s in there], lambda server: page_of(server.metrics()).max_loras)
    return {s: None if isinstance(each, str) else each for s, each in zip(there, found, strict=True)}


def _crowded(acting: Acting, s: int, wanted: set[str], staying: set[str]) -> str | None:
    """Return why a server has no room for these adapters beside others that stay there; None if it has."""
    count, host = len((wanted | staying) - acting.base), acting.servers[s].host
    if host.room is None or count <= host.room:
        return None
    beside = f", {len(staying)} of them not of the plan" if staying else ""
    return f"{host.name} has room for {counted(host.room, 'adapter')}, and would hold {count}{beside}"


def _misfit(acting: Acting, item: Bin, s: int, models: Models, slots: int | None) -> str | None:
    """Return why a server does not fit the plan's server `item`; None if it fits. `slots`: its `max_loras`."""
    server, profile, model = acting.servers[s], item.profile, acting.fleet.model
    own = {profile.model.name, profile.model.repository or "", profile.name}
    expected = {model} if model else {base_model(name) for name in own if name}
    names = set(models.base) if model else set(map(base_model, models.base))
    if models.base and not expected & names:
        planned = shown(model) if model else f"{shown(profile.model.name)} (`model` gives it another name)"
        return f"{server.name} serves {shown(models.base[0])}, the plan is for {planned}"
    placed = {acting.plan.workload.names[i] for i in item.adapters}
    if models.base and (absent := sorted((acting.base & placed).difference(models.base))):
        return f"{server.name} does not serve {shown(absent[0])}, the fleet's base model, but {shown(models.base[0])}"
    longest = models.max_model_len
    if longest is not None and longest < profile.engine.max_model_len:
        most = profile.engine.max_model_len
        return f"{server.name} takes requests of {longest} tokens, the plan's profile {most}"
    if server.host.profile not in (None, profile.name, profile.label):
        return f"{server.name} is of the profile {server.host.profile}, the plan's is {profile.label}"
    if slots is not None and slots != item.max_loras:
        return f"{server.name} was started with max_loras {slots}, the plan says {item.max_loras}: start it again"
    return None
