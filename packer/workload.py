"""A fleet of adapters with its traffic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from packer import checks
from packer.adapter import A_LENGTH, IDLE_RATE, Adapter, changed
from packer.arrival import Arrivals, RequestTrace
from packer.errors import ValidationError, shown
from packer.fingerprint import fingerprint
from packer.goal import Goal, GoalLike
from packer.job import FineTuning
from packer.lengths import Lengths, expected_of
from packer.memo import cached_property
from packer.sessions import Sessions

_T = TypeVar("_T", bound=np.generic)

# ShareGPT as the paper's clients sent it: mean and cv measured over the request pools.
SHAREGPT_INPUT = Lengths.gamma(mean=223.0, cv=1.1)
SHAREGPT_OUTPUT = Lengths.gamma(mean=195.0, cv=1.04)
SHAREGPT_CORRELATION = -0.39

_KINDS = (
    ("input_tokens", Lengths, A_LENGTH),
    ("output_tokens", Lengths, A_LENGTH),
    ("arrivals", Arrivals, "packer.Arrivals('lognormal', cv=2)"),
    ("slo", Goal, "packer.Goal.of(p95_ttft_ms=500)"),
    ("fine_tuning", FineTuning, "packer.FineTuning(samples=1000)"),
    ("sessions", Sessions, "packer.Sessions(turns=4)"),
)


_WITHOUT_RATES = ("names", "ranks", "mean_input_tokens", "mean_output_tokens", "mean_tokens")
"""Columns of a fleet that do not depend on the rates."""


@dataclass(frozen=True)
class Workload:
    """A fleet of adapters, with their lengths and arrivals. Immutable; columns are NumPy arrays.

    `adapters`: at least one, with unique names. Either every adapter names its base model, or none does.
    `input_tokens`, `output_tokens`: length distributions of adapters without their own (default: ShareGPT's).
    `length_correlation`: correlation of the input and output length of a request, in [-1, 1], measured between their
    normal scores.
    `arrivals`: the arrival process.
    `name`: name in plans and reports.
    `slo`: the latency goal.
    `fine_tuning`: fine-tuning job that each server runs alongside its requests; None: no job.
    `sessions`: conversations of adapters without their own; None: requests are independent of each other.
    """

    adapters: tuple[Adapter, ...]
    input_tokens: Lengths = SHAREGPT_INPUT
    output_tokens: Lengths = SHAREGPT_OUTPUT
    length_correlation: float = SHAREGPT_CORRELATION
    arrivals: Arrivals = field(default_factory=Arrivals)
    name: str = "workload"
    slo: Goal = field(default_factory=Goal)
    fine_tuning: FineTuning | None = None
    sessions: Sessions | None = None

    def __init__(
        self, adapters: Iterable[Adapter], input_tokens: Lengths = SHAREGPT_INPUT,
        output_tokens: Lengths = SHAREGPT_OUTPUT, length_correlation: float = SHAREGPT_CORRELATION,
        arrivals: Arrivals | None = None, name: str = "workload", slo: Goal | None = None,
        fine_tuning: FineTuning | None = None, sessions: Sessions | None = None,
    ) -> None:  # fmt: skip
        correlation = checks.real("length_correlation", length_correlation, low=-1.0, high=1.0)
        if not isinstance(adapters, Iterable):
            raise ValidationError(f"Expected a list of packer.Adapter for a workload, got {shown(adapters)}.")
        arrivals, slo = arrivals if arrivals is not None else Arrivals(), slo if slo is not None else Goal()
        given = (tuple(adapters), input_tokens, output_tokens, correlation, arrivals, name, slo, fine_tuning, sessions)
        for each, value in zip(fields(self), given, strict=True):
            object.__setattr__(self, each.name, value)
        self._check_adapters()
        self._check_rest()

    def _check_adapters(self) -> None:
        if not self.adapters:
            raise ValidationError("Expected a workload to have at least one adapter, got 0.")
        seen: set[str] = set()
        for adapter in self.adapters:
            checks.instance("an adapter", adapter, Adapter, "packer.Adapter(name, rank, rate)")
            if adapter.name in seen:
                raise ValidationError(f"Expected unique adapter names, got {shown(adapter.name)} twice.")
            seen.add(adapter.name)
        without = [adapter.name for adapter in self.adapters if adapter.model is None]
        if without and len(without) < len(self.adapters):
            rule = f"Expected every adapter to name its base model, or none, got {shown(without[0])} without one."
            raise ValidationError(rule)

    def _check_rest(self) -> None:
        checks.instance("name", self.name, str, "str(NAME)")
        for key, kind, made_by in _KINDS:
            if getattr(self, key) is not None:
                checks.instance(key, getattr(self, key), kind, made_by)
        trace = self.arrivals.trace
        if trace is not None and len(trace) and int(trace.adapter.max()) >= len(self.adapters):
            rule = f"Expected the trace's adapters to be < {len(self.adapters)}, got {int(trace.adapter.max())}."
            raise ValidationError(rule)

    def __len__(self) -> int:
        return len(self.adapters)

    def __hash__(self) -> int:
        # Hours are keys, and hashing thousands of adapters each time took a sixth of a plan for 5,000.
        return hash((len(self.adapters), self.rate))

    def __repr__(self) -> str:
        return f"<Workload {self.name!r}: {len(self):,} adapters, {self.rate:g} req/s, {self.arrivals.kind}>"

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names, in order."""
        return tuple(adapter.name for adapter in self.adapters)

    @cached_property
    def models(self) -> tuple[str, ...]:
        """Base models of the adapters, sorted; empty if the adapters name none."""
        return tuple(sorted({adapter.model for adapter in self.adapters if adapter.model is not None}))

    @cached_property
    def ranks(self) -> npt.NDArray[np.int64]:
        """Ranks, int64 (n,)."""
        return _frozen(np.array([adapter.rank for adapter in self.adapters], dtype=np.int64))

    @cached_property
    def shared_prefix_tokens(self) -> npt.NDArray[np.int64]:
        """Number of tokens that all prompts of an adapter begin with, int64 (n,)."""
        return _frozen(np.array([adapter.shared_prefix_tokens for adapter in self.adapters], dtype=np.int64))

    @cached_property
    def sessions_by_adapter(self) -> tuple[Sessions | None, ...]:
        """Sessions of each adapter; None if its requests have no later turns."""
        found = (adapter.sessions or self.sessions for adapter in self.adapters)
        return tuple(own if own is not None and own.turns > 1.0 else None for own in found)

    @cached_property
    def has_sessions(self) -> bool:
        """Whether requests are drawn in sessions; false for a replayed trace, which records its own sessions."""
        given = self.sessions is not None or any(each.sessions is not None for each in self.adapters)
        return given and self.arrivals.trace is None and any(self.sessions_by_adapter)

    @cached_property
    def shares_prefixes(self) -> bool:
        """Whether prompts of an adapter share prefixes, by `shared_prefix_tokens` or by drawn sessions."""
        return self.has_sessions or bool(self.shared_prefix_tokens.any())

    @cached_property
    def n_loras(self) -> int:
        """Number of adapters with a rank > 0; rank 0 stands for requests to the base model."""
        return int(np.count_nonzero(self.ranks))

    @cached_property
    def rates(self) -> npt.NDArray[np.float64]:
        """Request rates, float64 (n,), req/s."""
        return _frozen(np.array([adapter.rate for adapter in self.adapters]))

    @cached_property
    def given_rates(self) -> npt.NDArray[np.float64]:
        """Request rates as files and tables show them, float64 (n,), req/s: 0 of idle adapters (`IDLE_RATE`)."""
        return _frozen(np.where(self.rates == IDLE_RATE, 0.0, self.rates))

    @cached_property
    def mean_input_tokens(self) -> npt.NDArray[np.float64]:
        """Mean prompt length of each adapter over the requests of all turns, float64 (n,), tokens."""
        first = self._expected[0].copy()
        if self.has_sessions:
            for k, own in enumerate(self.sessions_by_adapter):
                if own is not None:
                    given = float(self.mean_output_tokens[k]), self.adapters[k].shared_prefix_tokens
                    first[k] = own.grown_tokens(float(first[k]), *given)
        return _frozen(first)

    @cached_property
    def mean_output_tokens(self) -> npt.NDArray[np.float64]:
        """Mean output length of each adapter, float64 (n,), tokens."""
        return _frozen(self._expected[1])

    @cached_property
    def _expected(self) -> npt.NDArray[np.float64]:
        """Mean lengths of prompts without the tokens of earlier turns, and of outputs, float64 (2, n), tokens."""
        first = [a.input_tokens or self.input_tokens for a in self.adapters]
        return expected_of(first + [a.output_tokens or self.output_tokens for a in self.adapters]).reshape(2, -1)

    @cached_property
    def mean_tokens(self) -> npt.NDArray[np.float64]:
        """Mean input + mean output length of each adapter's requests, float64 (n,), tokens."""
        return _frozen(self.mean_input_tokens + self.mean_output_tokens)

    @cached_property
    def offered_tok_s_by_adapter(self) -> npt.NDArray[np.float64]:
        """Offered load of each adapter, float64 (n,), tok/s."""
        return _frozen(self.rates * self.mean_tokens)

    @cached_property
    def offered_tok_s(self) -> float:
        """Offered load: Σ rate × (mean input + mean output tokens), tok/s."""
        return float(self.offered_tok_s_by_adapter.sum())

    @cached_property
    def rate(self) -> float:
        """Σ rate, req/s."""
        return float(self.rates.sum())

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all fields but the workload's name: 16 hex digits."""
        parts = {each.name: getattr(self, each.name) for each in fields(self)}
        return fingerprint(**{name: part for name, part in parts.items() if name != "name"})

    def subset(self, indices: Sequence[int], shares: Sequence[float] | None = None) -> Workload:
        """The workload of one bin: the adapters at `indices` only, each with its share of the rate (default 1)."""
        arrivals = self.arrivals
        if arrivals.trace is not None:
            arrivals = _subset_trace(arrivals, indices, len(self), shares)
        adapters = [self.adapters[i] for i in indices]
        if shares is not None:
            pairs = zip(adapters, shares, strict=True)
            adapters = [a if share == 1.0 else a.at_rate(a.rate * share) for a, share in pairs]
        made, own = replace(self, adapters=tuple(adapters), arrivals=arrivals), np.array(indices)
        known = (name for name in _WITHOUT_RATES[1:] if name in vars(self))
        vars(made).update({name: _frozen(vars(self)[name][own]) for name in known})
        return made

    def of_model(self, model: str | None) -> tuple[tuple[int, ...], Workload]:
        """Indices of the adapters of a base model, and the workload with only these adapters."""
        own = tuple(i for i, adapter in enumerate(self.adapters) if adapter.model == model)
        return own, self if len(own) == len(self) else self.subset(own)

    def scaled(self, rate_factor: float) -> Workload:
        """The same fleet with all rates times `rate_factor` (a trace is replayed faster); idle adapters stay idle."""
        checks.real("rate_factor", rate_factor, low=0.0, open_low=True)
        adapters = tuple(a if a.rate == IDLE_RATE else a.at_rate(a.rate * rate_factor) for a in self.adapters)
        arrivals, trace = self.arrivals, self.arrivals.trace
        if trace is not None:
            arrivals = replace(arrivals, trace=trace.faster(rate_factor))
        made = replace(self, adapters=adapters, arrivals=arrivals)
        vars(made).update({name: vars(self)[name] for name in _WITHOUT_RATES if name in vars(self)})
        return made

    @property
    def assumed_lengths(self) -> tuple[str, ...]:
        """Which of "input_tokens" and "output_tokens" are assumed: the fleet has the default, ShareGPT's, and an
        adapter has no lengths of its own. Empty for a trace."""
        if self.arrivals.trace is not None:
            return ()
        sides = (("input_tokens", SHAREGPT_INPUT), ("output_tokens", SHAREGPT_OUTPUT))
        return tuple(
            side
            for side, default in sides
            if getattr(self, side) == default and any(getattr(a, side) is None for a in self.adapters)
        )

    @property
    def assuming(self) -> int:
        """Number of adapters with `assumed_lengths`."""
        sides = self.assumed_lengths
        return sum(any(getattr(a, side) is None for side in sides) for a in self.adapters)

    def slot_rank(self, given: int | None = None) -> int:
        """`max_lora_rank` of slots that hold every adapter: `given`, or else the smallest that vLLM accepts. Raises
        `ValidationError`: vLLM does not accept `given`, or it is smaller than the largest rank."""
        largest = int(self.ranks.max())
        rank = checks.slot_rank_for(largest) if given is None else checks.slot_rank("max_lora_rank", given)
        if rank < largest:
            raise ValidationError(f"Expected max_lora_rank >= the largest rank, {largest}, got {rank}.")
        return rank

    def as_independent(self, *, cached: bool) -> Workload:
        """The same fleet without sessions and shared prefixes, but with the same mean prompt lengths. `cached`:
        subtract the tokens that an unlimited prefix cache saves, as an approximation of prefix caching."""
        if not self.shares_prefixes:
            return self
        adapters = []
        means = self.mean_input_tokens.tolist()
        for adapter, own, mean in zip(self.adapters, self.sessions_by_adapter, means, strict=True):
            first, prefix = adapter.input_tokens or self.input_tokens, adapter.shared_prefix_tokens
            left = mean
            if cached:
                left = max(first.expected - prefix, 0.05 * first.expected)
                if own is not None:
                    left += (own.turns - 1.0) * own.added_tokens(first.expected, prefix)
                    left /= own.turns
            if own is not None or (cached and prefix):
                adapter = changed(adapter, input_tokens=first.scaled(left))
            adapters.append(changed(adapter, shared_prefix_tokens=0, sessions=None))
        return replace(self, adapters=tuple(adapters), sessions=None)

    def tuned_by(self, policy: str) -> Workload:
        """The same fleet whose fine-tuning job (or a default job, if it has none) runs by this policy."""
        return replace(self, fine_tuning=replace(self.fine_tuning or FineTuning(), policy=policy))

    def held_to(self, slo: GoalLike | tuple[str, ...] | None) -> Workload:
        """The workload with its goal changed by `slo` (`Goal.changed_by`) or by several texts; None changes nothing.
        Raises `ValidationError`: `slo` has limits for an slo_class that no adapter has, or texts leave an adapter's
        slo_class without limits."""
        if slo is None:
            return self
        goal = self.slo.parsed(slo) if isinstance(slo, tuple) else self.slo.changed_by(slo)
        unused = dict(goal.classes).keys() - dict(self.slo.classes) - {a.slo_class for a in self.adapters}
        if unused:
            known = sorted({adapter.slo_class for adapter in self.adapters if adapter.slo_class is not None})
            have = ", ".join(map(shown, known[:10])) or "none"
            raise ValidationError(f"Expected limits for an slo_class of the fleet ({have}), got {shown(min(unused))}.")
        if isinstance(slo, str | tuple):
            goal.check(self)
        return replace(self, slo=goal)

    def with_arrivals(self, arrivals: Arrivals) -> Workload:
        """The same fleet with another arrival process; its adapters are not checked again."""
        made, kept = object.__new__(Workload), {each.name for each in fields(self)} | {"names", "ranks"}
        vars(made).update({name: value for name, value in vars(self).items() if name in kept}, arrivals=arrivals)
        made._check_rest()
        return made

    def replaying(self, requests: RequestTrace) -> Workload:
        """The same fleet whose arrivals are these requests."""
        return self.with_arrivals(Arrivals("trace", trace=requests))


def _frozen(array: npt.NDArray[_T]) -> npt.NDArray[_T]:
    array.setflags(write=False)
    return array


def _subset_trace(arrivals: Arrivals, indices: Sequence[int], n: int, shares: Sequence[float] | None) -> Arrivals:
    """The requests of some adapters. For a share below 1, only that share of the adapter's requests or sessions."""
    trace = arrivals.trace
    assert trace is not None
    position = np.full(n, -1, dtype=np.int64)
    position[list(indices)] = np.arange(len(indices))
    local = position[trace.adapter]
    keep = local >= 0
    for k, share in enumerate(shares or ()):
        if share < 1.0:
            rows = np.flatnonzero(local == k)
            numbers = np.arange(len(rows))  # of the session that each request belongs to
            if trace.sessions is not None:
                _, first, which = np.unique(trace.sessions[rows], return_index=True, return_inverse=True)
                numbers = np.argsort(np.argsort(first))[which]
            keep[rows[np.floor((numbers + 1) * share) <= np.floor(numbers * share)]] = False
    return replace(arrivals, trace=replace(trace.take(keep), adapter=local[keep], end_s=trace.span_s))
