"""Lengths and hit rates of requests: as planned, until measurements differ by more than chance explains."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from packer.adapter import Adapter
from packer.arrays import BoolArray, FloatArray
from packer.lengths import Lengths
from packer.live.traffic import Sampled
from packer.operate.drift import as_met
from packer.traces.prefixes import with_hit_rate
from packer.words import counted, listed
from packer.workload import Workload

STANDARD_ERRORS, LEAST, FEWEST = 4.0, 0.05, 50
"""A difference counts if it exceeds this many standard errors and this share, after this many requests: capacities are
known to 5 %, and with one observation a minute of many servers smaller differences occur by chance."""
Side = Literal["input_tokens", "output_tokens"]
SIDES: tuple[tuple[Side, str], ...] = (("input_tokens", "prompts"), ("output_tokens", "outputs"))


@dataclass(frozen=True)
class Observation:
    """What was measured, at one time.

    `load_tok_s`: offered load of each adapter over a long window, float64 (m,).
    `recent_tok_s`, `before_tok_s`: offered load of all in the last short window, and in the one before it.
    `ready`: servers that answer, bool (S,).
    `held`: adapters on each server with their shares, as observed. If it is None, or `pretended` (a dry run), the
    decided placement counts.
    `samples`: by server, its requests since its adapters changed.
    """

    load_tok_s: FloatArray
    recent_tok_s: float
    before_tok_s: float
    ready: BoolArray
    held: Sequence[Mapping[int, float]] | None = None
    samples: Mapping[int, Sampled] = field(default_factory=dict)
    pretended: bool = False


@dataclass(eq=False)
class Requests:
    """The requests that are assumed of each adapter. `hits`: the hit rate that was adopted for a server, by number."""

    fleet: Workload
    hits: dict[int, float] = field(default_factory=dict)
    _mixes: dict[int, tuple[frozenset[int], float]] = field(default_factory=dict)

    def same_since_s(self, s: int) -> float:
        """Since when a server has served the same set of adapters; infinite if it has served none."""
        return self._mixes[s][1] if s in self._mixes else math.inf

    def learn(
        self, now_s: float, loads: Mapping[int, Mapping[int, float]], samples: Mapping[int, Sampled],
        hit_rate: Callable[[int], float | None],
    ) -> dict[int, list[str]]:  # fmt: skip
        """Adopt measurements that differ from what is known by more than their error; return these by server, in words.

        vLLM's counters do not tell adapters apart: all adapters with most of their load on a server get its factor. A
        sample counts only if the server has the same adapters as at the last call.

        `loads`: by server that has adapters, the load of each, tok/s. `hit_rate`: the twin's for a server; None if the
        server has no prefix cache.
        """
        same = {s for s, own in loads.items() if s in self._mixes and self._mixes[s][0] == own.keys()}
        self._mixes |= {s: (frozenset(own), now_s) for s, own in loads.items() if s not in same}
        most: dict[int, tuple[float, int]] = {}
        for s, part in loads.items():
            for a, tok_s in part.items():
                most[a] = max(most.get(a, (0.0, s)), (tok_s, s))
        homes: dict[int, list[int]] = {}
        for a, (_, s) in most.items():
            homes.setdefault(s, []).append(a)
        said: dict[int, list[str]] = {}
        for s, sample in samples.items():
            own = homes.get(s, [])
            if s not in same or sample.requests < FEWEST or not own:
                continue
            adapters = list(self.fleet.adapters)
            for side, name in SIDES:
                if side == "input_tokens" and any(self.fleet.sessions_by_adapter[a] for a in loads[s]):
                    continue  # first prompts are not known apart from later ones
                measured, (mean, error) = getattr(sample, side), self.expected(loads[s], side, sample)
                if abs(math.log(max(measured, 1e-9) / mean)) > max(STANDARD_ERRORS * error, LEAST):
                    for a in own:
                        adapters[a] = self._longer(adapters[a], side, measured / mean)
                    found = f"{name} have {measured:,.0f} tokens, {mean:,.0f} were expected, ± {error:.1%}"
                    said.setdefault(s, []).append(found)
            if s in said:
                self.fleet = replace(self.fleet, adapters=tuple(adapters))
            if found := self._learn_hits(s, own, sample, hit_rate):
                said.setdefault(s, []).append(found)
        return said

    def expected(self, own: Mapping[int, float], side: Side, sample: Sampled) -> tuple[float, float]:
        """The known mean length of a server's requests, tokens, and the relative standard error of a measured mean. The
        error combines that of a mean of `sample.requests` lengths with that of the shares of unlike adapters."""
        rows, fleet = list(own), self.fleet
        weight = np.array(list(own.values())) / fleet.mean_tokens[rows]
        weight /= weight.sum()
        means = (fleet.mean_input_tokens if side == "input_tokens" else fleet.mean_output_tokens)[rows]
        cv = np.array([(getattr(fleet.adapters[a], side) or getattr(fleet, side)).cv for a in rows])
        mean = float(weight @ means)
        between = max(0.0, float(weight @ means**2) / mean**2 - 1.0)
        spread = float(weight @ (means**2 * (1.0 + cv**2))) / mean**2 - 1.0
        return mean, math.sqrt(spread / sample.requests + between / sample.looks)

    def _longer(self, adapter: Adapter, side: Side, factor: float) -> Adapter:
        """The adapter with its lengths scaled by `factor`."""
        old: Lengths = getattr(adapter, side) or getattr(self.fleet, side)
        ends = [None if end is None else max(1, round(factor * end)) for end in (old.low, old.high)]
        new: dict[str, Any] = {side: replace(old.scaled(factor * old.mean), low=ends[0] or 1, high=ends[1])}
        return replace(adapter, **new)

    def _learn_hits(self, s: int, own: list[int], sample: Sampled, hit_rate: Callable[[int], float | None]) -> str:
        """Give the adapters of a server shared prefixes that yield its measured hit rate, if it differs; say so."""
        fleet, now = self.fleet, sample.hit_rate
        if now is None or any(fleet.sessions_by_adapter[a] for a in own):
            return ""
        before = self.hits[s] if s in self.hits else hit_rate(s)
        if before is None:
            return ""
        cv = max((fleet.adapters[a].input_tokens or fleet.input_tokens).cv for a in own)
        # A rate of 0 or 1 would have no error.
        share = min(max(now, 1.0 / sample.requests), 1.0 - 1.0 / sample.requests)
        # The rate is of tokens: prompts of unequal lengths count as fewer equal ones.
        error = math.sqrt(share * (1.0 - share) * (1.0 + cv**2) / sample.requests)
        if abs(now - before) <= max(STANDARD_ERRORS * error, LEAST):
            return ""
        adapters = list(fleet.adapters)
        for a, adapter in zip(own, with_hit_rate(fleet.subset(own), now).adapters, strict=True):
            adapters[a] = adapter
        self.fleet, self.hits[s] = replace(fleet, adapters=tuple(adapters)), now
        return f"{now:.1%} of the prompts' tokens are in the prefix cache, {before:.1%} were expected, ± {error:.1%}"

    def meet(self, seen: Workload, span_s: float) -> str:
        """Adopt measured lengths, prefixes and sessions that differ by more than their error; say so in a sentence."""
        number = {name: j for j, name in enumerate(seen.names)}
        adapters, changed = list(self.fleet.adapters), []
        for k, old in enumerate(adapters):
            j = number.get(old.name)
            if j is None or (count := seen.adapters[j].rate * span_s) < FEWEST:
                continue
            met = seen.adapters[j]
            met = replace(
                met, rate=old.rate, input_tokens=met.input_tokens or seen.input_tokens,
                output_tokens=met.output_tokens or seen.output_tokens,
            )  # fmt: skip
            sides = (
                (self.fleet.mean_input_tokens[k], seen.mean_input_tokens[j], met.input_tokens),
                (self.fleet.mean_output_tokens[k], seen.mean_output_tokens[j], met.output_tokens),
            )
            if any(
                abs(math.log(new / was)) > max(STANDARD_ERRORS * own.cv / math.sqrt(count), LEAST)
                for was, new, own in sides
                if own is not None
            ):
                adapters[k] = as_met(old, met, in_sessions=self.fleet.sessions_by_adapter[k] is not None)
                changed += [old.name] if adapters[k] != old else []
        if not changed:
            return ""
        self.fleet = replace(self.fleet, adapters=tuple(adapters))
        return f"other lengths than expected of {counted(len(changed), 'adapter')}: {listed(changed, 5)}"

    def carried(self, planned: Workload, now: Workload) -> Requests:
        """What was learnt, for another fleet: kept for adapters whose planned requests are unchanged."""

        def said(fleet: Workload, adapter: Adapter) -> tuple[object, ...]:
            lengths = adapter.input_tokens or fleet.input_tokens, adapter.output_tokens or fleet.output_tokens
            return *lengths, adapter.shared_prefix_tokens, adapter.sessions or fleet.sessions

        before = {old.name: said(planned, old) for old in planned.adapters}
        known = {each.name: each for each in self.fleet.adapters}
        adapters = []
        for each in now.adapters:
            if before.get(each.name) == said(now, each):
                old = known[each.name]
                each = replace(
                    each, input_tokens=old.input_tokens, output_tokens=old.output_tokens,
                    shared_prefix_tokens=old.shared_prefix_tokens,
                )  # fmt: skip
            adapters.append(each)
        return Requests(replace(now, adapters=tuple(adapters)), dict(self.hits))
