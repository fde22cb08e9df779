"""Specification of arrival processes; `packer.twin.arrivals` draws requests from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal, get_args

import numpy as np

from packer import checks
from packer.adapter import MAX_PRIORITY
from packer.arrays import BoolArray, FloatArray, IntArray, own
from packer.blocks import Blocks, apart, at_rows
from packer.errors import ValidationError
from packer.lengths import MAX_TOKENS
from packer.public import check_fields, checked

Kind = Literal["poisson", "lognormal", "unpredictable", "piecewise", "bursty", "trace"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MIN_PERIOD_S = 1.0  # Shortest period of arrivals that change with time: each period costs memory and time.


def stepped(step_s: float) -> list[str]:
    """The note on recorded times that come in steps of `step_s`; none for 0."""
    said = f"timestamps come in steps of {step_s:g} s: the requests of a step are spread over it at random"
    return [said] if step_s else []


@dataclass(frozen=True, eq=False)
class RequestTrace:
    """Recorded requests, sorted by time.

    `time_s`: float64 (n,), seconds from the start, not decreasing, >= 0.
    `adapter`: int64 (n,), index of the adapter in the workload.
    `input_tokens`, `output_tokens`: int64 (n,), >= 1.
    `blocks`: content of the requests as ids of token blocks, which says whose prefixes are equal. None: no two
    requests share a prefix.
    `end_s`: when the recording ended; None: one second after the last request. `Workload.subset` keeps it.
    `sessions`: int64 (n,), >= 0: the session of each request. None: each request is a session of its own. Without
    `blocks`, a request's prompt begins with all earlier tokens of its session if it is at least as long as they are.
    `priority`: int64 (n,): priority of each request on servers with `scheduling_policy` "priority"; smaller is served
    first. None: the priority of its adapter.
    `step_s`: the recorded times were multiples of `step_s`, s, and were then spread over each step; 0: they were not.
    `start_s`: origin of the times, s since 1970 (UTC), or since the start of a recording without dates.
    `notes`: what to tell a user about how the recording was read; of a file, `stepped` alone.
    """

    time_s: FloatArray
    adapter: IntArray
    input_tokens: IntArray
    output_tokens: IntArray
    blocks: Blocks | None = field(default=None, kw_only=True)
    end_s: float | None = field(default=None, kw_only=True)
    sessions: IntArray | None = field(default=None, kw_only=True)
    priority: IntArray | None = field(default=None, kw_only=True)
    step_s: float = field(default=0.0, kw_only=True)
    start_s: float = field(default=0.0, kw_only=True)
    notes: tuple[str, ...] = field(default=(), kw_only=True, compare=False)

    @checked
    def __post_init__(self) -> None:
        self._keep_types()
        n = len(self.time_s)
        if any(len(column) != n for column in (self.adapter, self.input_tokens, self.output_tokens)):
            raise ValidationError("Expected the columns of a request trace to have the same length.")
        if n and (self.time_s[0] < 0 or np.any(np.diff(self.time_s) < 0) or not np.isfinite(self.time_s[-1])):
            raise ValidationError("Expected the times of a request trace to be finite, >= 0 and sorted.")
        if n and min(self.adapter.min(), self.input_tokens.min() - 1, self.output_tokens.min() - 1) < 0:
            raise ValidationError("Expected a request trace to have adapters >= 0 and lengths >= 1.")
        if n and max(self.input_tokens.max(), self.output_tokens.max()) > MAX_TOKENS:
            raise ValidationError(f"Expected the lengths of a request trace to be <= {MAX_TOKENS:,} tokens.")
        if self.end_s is not None and n and not self.time_s[-1] < self.end_s:
            raise ValidationError(f"Expected a request trace to end after its last request, got {self.end_s}.")
        self._check_blocks()
        if self.sessions is not None and (len(self.sessions) != n or (n and int(self.sessions.min()) < 0)):
            raise ValidationError("Expected a session >= 0 for each request of a request trace.")
        if self.priority is not None:
            high = np.flatnonzero(np.abs(self.priority.astype(np.float64)) > MAX_PRIORITY)[:1].tolist()
            wrong = [f"{self.priority[k]} in request {k:,}" for k in high]
            wrong += [f"{len(self.priority):,}"] if len(self.priority) != n else []
            if wrong:
                rule = f"Expected a priority of at most ± {MAX_PRIORITY:,} for each of {n:,} requests"
                raise ValidationError(f"{rule}, got {wrong[0]}.")

    @classmethod
    def unchecked(
        cls, time_s: FloatArray, adapter: IntArray,
        input_tokens: IntArray, output_tokens: IntArray,
    ) -> RequestTrace:  # fmt: skip
        """A trace of simulated requests from its columns, without checks."""
        made, write = object.__new__(cls), object.__setattr__
        given = (time_s, adapter, input_tokens, output_tokens, None, None, None, None, 0.0, 0.0, ())
        for each, column in zip(fields(cls), given, strict=True):
            write(made, each.name, column)
        for column in given[:4]:
            column.setflags(write=False)
        return made

    def _keep_types(self) -> None:
        """Store the columns as arrays of their types, and the times as floats."""
        for key, low in (("step_s", 0.0), ("end_s", 0.0), ("start_s", -1e15)):
            if key != "end_s" or self.end_s is not None:
                checks.keep_real(self, key, f"{key} of a request trace", low=low)
        for key in ("time_s", "adapter", "input_tokens", "output_tokens", "sessions", "priority"):
            given = getattr(self, key)
            if given is not None or key not in ("sessions", "priority"):
                column = checks.row(f"{key} of a request trace", given, whole=key != "time_s")
                object.__setattr__(self, key, own(column))

    def _check_blocks(self) -> None:
        """Check that each request has ids for all full blocks of its prompt, and at most one id per block."""
        if self.blocks is None:
            return
        checks.instance("blocks of a request trace", self.blocks, Blocks, "packer.Blocks(starts, ids, tokens)")
        n, size, counts = len(self), self.blocks.tokens, self.blocks.counts
        if len(counts) != n:
            raise ValidationError(f"Expected blocks of {n:,} requests, got blocks of {len(counts):,}.")
        prompt, total = self.input_tokens // size, -(-(self.input_tokens + self.output_tokens) // size)
        wrong = np.flatnonzero((counts < prompt) | (counts > total))
        if len(wrong):
            k = int(wrong[0])
            raise ValidationError(
                f"Expected an id for each of the {prompt[k]:,} full blocks of {size} tokens in the prompt of request "
                f"{k:,} ({self.input_tokens[k]:,} tokens), and at most {total[k]:,} with its output, got {counts[k]:,}."
            )

    def __len__(self) -> int:
        return len(self.time_s)

    @property
    def span_s(self) -> float:
        """Duration of the trace, s: `end_s`, or its default; 0 without requests and `end_s`."""
        if self.end_s is not None:
            return self.end_s
        return float(self.time_s[-1]) + 1.0 if len(self) else 0.0

    def take(self, rows: slice | IntArray | BoolArray) -> RequestTrace:
        """The requests of some rows, which must be in order of time; `end_s` is not kept."""
        return replace(self, **at_rows(self, rows), end_s=None)

    @classmethod
    def joined(cls, parts: Sequence[RequestTrace], *, end_s: float | None = None) -> RequestTrace:
        """The requests of several traces, concatenated; requests of different traces share no prefix and no session."""
        columns = ("time_s", "adapter", "input_tokens", "output_tokens")
        found = [np.concatenate([getattr(part, key) for part in parts]) for key in columns]
        blocks = [part.blocks for part in parts if part.blocks is not None]
        sessions = [part.sessions for part in parts if part.sessions is not None]
        priority = [part.priority for part in parts if part.priority is not None]
        return cls(
            *found, end_s=end_s, blocks=Blocks.joined(blocks) if len(blocks) == len(parts) else None,
            sessions=np.concatenate(apart(sessions)) if len(sessions) == len(parts) else None,
            priority=np.concatenate(priority) if len(priority) == len(parts) else None,
        )  # fmt: skip

    def faster(self, factor: float) -> RequestTrace:
        """The same requests with all times divided by `factor`, so that every rate is multiplied by it."""
        return replace(self, time_s=self.time_s / factor, end_s=self.span_s / factor, step_s=self.step_s / factor)


@dataclass(frozen=True, slots=True)
class Bursts:
    """A random factor on a request rate: stationary, with mean 1 and gamma-distributed values.

    `cv`: coefficient of variation of the factor, > 0.
    `scales`: pairs (time scale in s, weight), at least one; the weights are > 0 and sum to 1. The factor is the gamma
    quantile of a Gaussian process whose autocorrelation at lag t is Σ weight × exp(−t / time scale).
    """

    cv: float
    scales: tuple[tuple[float, float], ...]

    @checked
    def __post_init__(self) -> None:
        checks.keep_real(self, "cv", "cv of bursts", low=1e-3, high=100.0)
        if not self.scales:
            raise ValidationError("Expected bursts to have at least one time scale, got 0.")
        scales = tuple(
            (
                checks.real("a time scale of bursts (s)", time_s, low=1e-3, high=1e7),
                checks.real("a weight of bursts", weight, low=0.0, high=1.0, open_low=True),
            )
            for time_s, weight in self.scales
        )
        object.__setattr__(self, "scales", scales)
        total = math.fsum(weight for _, weight in self.scales)
        if abs(total - 1.0) > 0.01:
            raise ValidationError(f"Expected the weights of bursts to sum to 1, got {total:.6g}.")

    @classmethod
    def parse(cls, text: str) -> Bursts:
        """Parse the cell of a table: cv;time scale in s:weight;… Raises `ValueError`: the text has another form."""
        cv, *parts = text.split(";")
        scales = [tuple(map(checks.decimal, part.split(":"))) for part in parts]
        return cls(checks.decimal(cv), tuple((time_s, weight) for time_s, weight in scales))

    @property
    def text(self) -> str:
        """The text that `parse` reads."""
        return ";".join([repr(self.cv), *(f"{time_s!r}:{weight!r}" for time_s, weight in self.scales)])


@dataclass(frozen=True)
class Arrivals:
    """An arrival process. The processes of the adapters are independent, unless they have `common` bursts.

    Kinds: "poisson" (exponential gaps); "lognormal" (log-normal gaps with `cv`); "unpredictable" (every
    `period_s` each adapter switches between Poisson and log-normal gaps and halves or doubles its rate,
    clipped to [1/`span`, `span`] times the mean; the paper's unpredictable scenario); "piecewise" (all rates
    times `factors[k]` in the k-th period, repeating); "bursty" (Poisson streams whose rates are multiplied by
    the factor `common`, the same for all adapters, and by a factor `own`, independent for each adapter;
    rates are the means over the run; `factors` multiply them as those of piecewise arrivals); "trace" (recorded
    requests are replayed).
    """

    kind: Kind = "poisson"
    cv: float = 1.0
    period_s: float = 300.0
    span: float = 4.0
    factors: tuple[float, ...] = ()
    trace: RequestTrace | None = field(default=None, repr=False)
    common: Bursts | None = None
    own: Bursts | None = None

    @checked
    def __post_init__(self) -> None:
        checks.choice("arrivals", self.kind, KINDS)
        checks.keep_real(self, "cv", "cv of gaps", low=0.0, high=100.0)
        checks.keep_real(self, "period_s", low=MIN_PERIOD_S, high=1e9)
        checks.keep_real(self, "span", low=1.0, high=1e3)
        factors = tuple(checks.real("a rate factor", factor, low=0.0, high=1e3) for factor in self.factors)
        object.__setattr__(self, "factors", factors)
        if (self.kind == "piecewise" or self.cycle_s) and not any(self.factors):
            raise ValidationError(f"Expected the factors of {self.kind} arrivals to have at least one > 0.")
        if (self.kind == "bursty") != (self.common is not None or self.own is not None):
            raise ValidationError("Expected bursts with arrivals of kind 'bursty', and only with them.")
        if (self.kind == "trace") != (self.trace is not None):
            raise ValidationError("Expected a trace with arrivals of kind 'trace', and only with them.")
        check_fields(self)

    @property
    def description(self) -> str:
        """The process in words."""
        parts = [
            f"{whose} factor of cv {bursts.cv:.2g} over "
            + ", ".join(f"{time_s:g} s ({weight:.0%})" for time_s, weight in bursts.scales)
            for whose, bursts in (("common", self.common), ("own", self.own))
            if bursts is not None
        ]
        if self.cycle_s:
            parts.append(f"rates × {min(self.factors):.3g} … {max(self.factors):.3g} in periods of {self.period_s:g} s")
        return f"{self.kind}: {'; '.join(parts)}" if parts else self.kind

    @property
    def cycle_s(self) -> float:
        """Length of a cycle of the rates' `factors`, s; 0 if the mean rates are constant."""
        return self.period_s * len(self.factors) * (self.kind in ("piecewise", "bursty"))

    @property
    def mean_factor(self) -> float:
        """What the rates are multiplied by on average over a cycle of `factors`; 1 without one."""
        return float(np.mean(self.factors)) if self.cycle_s else 1.0

    @property
    def height(self) -> float:
        """The highest of the `factors` of a cycle; 1 without one."""
        return max(self.factors) if self.cycle_s else 1.0

    def following(self, trend: Sequence[float]) -> Arrivals:
        """Poisson or bursty arrivals whose mean rates follow a trend: the length of a period, s, and factors. () for
        constant mean rates. Arrivals of other kinds than these and "piecewise" stay as they are."""
        if self.kind not in ("poisson", "piecewise", "bursty"):
            return self
        kind: Kind = "bursty" if self.kind == "bursty" else "piecewise" if trend else "poisson"
        period_s, *factors = trend or (self.period_s,)
        return replace(self, kind=kind, factors=tuple(factors), period_s=period_s)

    @property
    def trend(self) -> tuple[float, ...]:
        """What `following` takes; () if the mean rates are constant."""
        return (self.period_s, *self.factors) if self.cycle_s else ()

    @property
    def varies(self) -> bool:
        """Whether hours differ: by bursts, changing rates, or gaps more irregular than those of a Poisson process."""
        return self.kind in ("bursty", "unpredictable") or (self.kind == "lognormal" and self.cv > 1.0)

    def whole_s(self, at_least_s: float) -> float:
        """Duration of a run, s: the span of a trace; else at least `at_least_s`, in whole cycles of `factors`."""
        if self.trace is not None:
            return self.trace.span_s or at_least_s
        return self.whole_cycles_s(at_least_s) if self.cycle_s else at_least_s

    def whole_cycles_s(self, at_least_s: float) -> float:
        """Shortest time of whole cycles of the rates that is at least `at_least_s`, s; other kinds: `at_least_s`."""
        cycle_s = self.period_s if self.kind == "unpredictable" else self.cycle_s
        return cycle_s * math.ceil(at_least_s / cycle_s) if cycle_s else at_least_s
