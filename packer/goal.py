"""The latency goal: limits, the level at which each is checked, and the adapters and requests that it covers. All that
takes limits has the same syntax (docs/how-to/what-if.md)."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from packer import checks
from packer.arrays import FloatArray, IntArray
from packer.errors import UnknownNameError, ValidationError, shown
from packer.memo import Memo
from packer.public import checked
from packer.words import listed

if TYPE_CHECKING:
    from packer.workload import Workload

Level = Literal["request", "adapter", "server"]
STATISTICS = {"mean": math.nan, "median": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}  # Their quantiles; NaN: the mean.
METRICS = ("ttft", "itl", "tpot", "e2e")
OF_REQUESTS = ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms", "normalised_ms")
"""Keys of limits on each request; normalised: e2e / output tokens."""
OF_MANY = tuple(f"{statistic}_{metric}_ms" for metric in METRICS for statistic in STATISTICS)  # Limits on statistics.
KEYS = (*OF_MANY, *OF_REQUESTS, *(f"server.{key}" for key in OF_MANY))  # Every key of a goal.
SPELLINGS = {"latency_ms": "e2e_ms"}  # Alternative names of keys, used in cluster files.
SHARES = ("adapter_share", "request_share")
MOST_KINDS = 4  # Largest number of kinds of limits that `Goal.order` distinguishes.


def level(key: str) -> Level:
    """Level at which the limit of a key is checked."""
    if key in OF_REQUESTS:
        return "request"
    of_gaps = key.endswith("_itl_ms") and not key.startswith("mean")
    return "server" if key.startswith("server.") or of_gaps else "adapter"


def metric(key: str) -> str:
    """Metric that a key limits: ttft, itl, tpot, e2e or normalised."""
    return key.rpartition(".")[2].removesuffix("_ms").rpartition("_")[2]


def _family(key: str) -> str:
    return {"tpot": "itl"}.get(metric(key), metric(key))


@dataclass(frozen=True, slots=True)
class Limits:
    """Latency limits, ms: on an adapter's p95 TTFT, on its mean ITL, and any others by their keys.

    An infinite value is no limit.
    """

    p95_ttft_ms: float = 2000.0
    mean_itl_ms: float = 100.0
    others: tuple[tuple[str, float], ...] = ()

    @checked
    def __post_init__(self) -> None:
        given = {key: value for key, value in dict(self.others).items() if value != math.inf}
        for key in ("p95_ttft_ms", "mean_itl_ms"):
            value = getattr(self, key)
            object.__setattr__(self, key, math.inf if value == math.inf else _limit(key, value))
        for key in given:
            if key not in KEYS:
                raise UnknownNameError("latency limit", str(key), KEYS[: -len(OF_MANY)])
        ordered = sorted(given, key=KEYS.index)
        object.__setattr__(self, "others", tuple((key, _limit(key, given[key])) for key in ordered))

    @classmethod
    def only(cls, values: Mapping[str, float]) -> Limits:
        """Limits with these values, by key, and no others."""
        return cls(math.inf, math.inf).changed(values)

    def changed(self, values: Mapping[str, float]) -> Limits:
        """The limits changed by `values`. A value for a metric drops its default limit (ITL and TPOT count as one).
        Raises `ValidationError`: a key is unknown, or a value breaks a rule."""
        values = {SPELLINGS.get(key, key): value for key, value in values.items()}
        families = {_family(key) for key in values}
        usual = {key: getattr(_USUAL, key) for key in ("p95_ttft_ms", "mean_itl_ms")}
        kept = {
            key: math.inf if value == usual.get(key) and _family(key) in families else value
            for key, value in self.to_dict().items()
        } | values
        own = {key: kept.pop(key, math.inf) for key in usual}
        return Limits(own["p95_ttft_ms"], own["mean_itl_ms"], tuple(kept.items()))

    def to_dict(self) -> dict[str, float]:
        """The finite limits, by key."""
        own = {"p95_ttft_ms": self.p95_ttft_ms, "mean_itl_ms": self.mean_itl_ms}
        return {key: value for key, value in own.items() if value != math.inf} | dict(self.others)

    def at(self, where: Level) -> dict[str, float]:
        """The limits of one level, by key."""
        return {key: value for key, value in self.to_dict().items() if level(key) == where}

    def __str__(self) -> str:
        limits = self.to_dict().items()
        return " and ".join(f"{words_of(key)} <= {time_words(key, value)}" for key, value in limits)


def _limit(key: str, value: float) -> float:
    return checks.real(key, value, low=0.0, open_low=True)


def words_of(key: str) -> str:
    """A limit's key in words: "p95 TTFT"."""
    of_server, name = key.startswith("server."), key.rpartition(".")[2].removesuffix("_ms")
    statistic, _, what = name.rpartition("_")
    what = {"e2e": "latency", "normalised": "latency per output token"}.get(what, what.upper())
    words = f"{statistic} {what}" if statistic else f"{what} of a request"
    return f"{words} of a server" if of_server or (statistic and level(key) == "server") else words


def time_words(key: str, value: float) -> str:
    """The value of a limit with its unit: "2 s", "100 ms"."""
    in_s = value >= 1000 and metric(key) in ("ttft", "e2e")
    return f"{value / 1000:g} s" if in_s else f"{value:g} ms"


_USUAL = Limits()


@dataclass(frozen=True, slots=True)
class Goal:
    """Latency limits, and the shares of adapters and requests that must keep them.

    `limits`: limits of adapters without a class, of requests and of servers.
    `classes`: limits of each `slo_class`, by name: a mapping or pairs.
    `adapter_share`: share of the adapters that must keep their limits, in ]0, 1].
    `request_share`: share of the requests that must keep limits of requests, in ]0, 1].
    """

    limits: Limits = Limits()
    classes: tuple[tuple[str, Limits], ...] = ()
    adapter_share: float = 1.0
    request_share: float = 0.99

    @checked
    def __post_init__(self) -> None:
        checks.instance("limits", self.limits, Limits, "packer.Limits(p95_ttft_ms=500)")
        pairs = self.classes.items() if isinstance(self.classes, Mapping) else self.classes
        named = {checks.name("the name of a class", name): limits for name, limits in pairs}
        for limits in named.values():
            for key in limits.at("server"):
                if key not in self.limits.to_dict():
                    raise ValidationError(f"Expected limits of servers outside of classes, got {key}.")
        object.__setattr__(self, "classes", tuple(sorted(named.items())))
        for key in SHARES:
            checks.keep_real(self, key, low=0.0, high=1.0, open_low=True)

    @classmethod
    def of(cls, p95_ttft_ms: float = 2000.0, mean_itl_ms: float = 100.0) -> Goal:
        """A goal with the same limits for every adapter."""
        return cls(Limits(p95_ttft_ms, mean_itl_ms))

    @classmethod
    def parse(cls, text: str) -> Goal:
        """The default goal changed by a text such as "p95_ttft_ms=2000,mean_itl_ms=100"; see `parsed`."""
        return cls().parsed([text])

    @classmethod
    def only(cls, values: Mapping[str, float]) -> Goal:
        """A goal with these limits and shares, by key, and no other limits."""
        limits = Limits.only({key: value for key, value in values.items() if key not in SHARES})
        return cls(limits, (), values.get("adapter_share", 1.0), values.get("request_share", 0.99))

    def changed_by(self, given: GoalLike | None) -> Goal:
        """The goal that `given` means: a goal itself, this goal changed by a text, or only the limits of a mapping.
        None returns this goal. Raises `ValidationError`: `given` has another form."""
        if given is None:
            return self
        if isinstance(given, str):
            return self.parsed([given])
        if isinstance(given, Mapping):
            return Goal.only(given)
        checks.instance("slo", given, Goal, 'packer.Goal.parse("p95_ttft_ms=500")')
        return given

    def parsed(self, texts: Iterable[str]) -> Goal:
        """This goal changed by texts: "p95_ttft_ms=500,adapter_share=0.95", "CLASS:mean_itl_ms=50" or "none".

        Semicolons separate several parts in one text. A new class takes limits that it does not name from the limits
        of adapters without a class. "none" removes all limits first.

        Raises `ValidationError`: a text has another form, or a value breaks a rule.
        """
        given = tuple(texts)
        for text in given:
            checks.instance("a goal", text, str, '"p95_ttft_ms=500"')
        parts = [part.strip() for text in given for part in text.split(";")]
        start = replace(self, limits=Limits.only({}), classes=()) if "none" in parts else self
        values: dict[str, dict[str, float]] = {"": {}}
        for part in parts:
            if part != "none":
                name, colon, rest = part.rpartition(":")
                known = KEYS if name else (*KEYS, *SHARES)
                found = assignments(rest if not colon or name else part, known)
                values.setdefault(name, {}).update(found)
        own = values.pop("")
        shares = {key: own.pop(key) for key in SHARES if key in own}
        limits = start.limits.changed(own)
        classes = dict(start.classes)
        for name, found in values.items():
            classes[name] = classes.get(name, limits).changed(found)
        return replace(start, limits=limits, classes=tuple(classes.items()), **shares)

    def check(self, workload: Workload) -> None:
        """Raise `ValidationError`, which names all of them, if a goal that has limits has none for some classes."""
        known, first = dict(self.classes), dict[str, str]()
        for adapter in () if self.is_none else workload.adapters:
            if adapter.slo_class is not None and adapter.slo_class not in known:
                first.setdefault(adapter.slo_class, adapter.name)
        if first:
            each = [f"{shown(name)} of adapter {shown(adapter)}" for name, adapter in first.items()]
            options = " ".join(f"--slo {name}:p95_ttft_ms=500,mean_itl_ms=50" for name in list(first)[:3])
            raise ValidationError(
                f"Expected limits for the slo_class {listed(each, 10)}: give them with {options}, or slo = […] in "
                "packer.toml."
            )

    # ---- limits by level
    def keys(self, where: Level) -> tuple[str, ...]:
        """Keys of the limits of one level, over all classes."""
        given = {key for limits in (self.limits, *dict(self.classes).values()) for key in limits.at(where)}
        return tuple(sorted(given, key=KEYS.index))

    @property
    def every_key(self) -> tuple[str, ...]:
        """Keys of all limits, over all levels and classes."""
        return (*self.keys("adapter"), *self.keys("request"), *self.keys("server"))

    @property
    def of_adapters(self) -> bool:
        """Whether no limit is one of requests or servers."""
        return not (self.keys("request") or self.keys("server"))

    def limits_of(self, slo_class: str | None) -> Limits:
        """The limits of a class; an unknown class has the limits of adapters without a class."""
        return dict(self.classes).get(slo_class or "", self.limits)

    def column(self, workload: Workload, key: str) -> FloatArray:
        """The limit `key` of each adapter, float64 (n,), ms; infinite for adapters without it. An unknown class has the
        limits of adapters without a class."""
        usual = self.limits.to_dict().get(key, math.inf)
        if not self.classes:
            return np.full(len(workload), usual)
        known = {name: limits.to_dict().get(key, math.inf) for name, limits in self.classes}
        return np.array([known.get(adapter.slo_class or "", usual) for adapter in workload.adapters])

    def order(self, workload: Workload) -> IntArray:
        """The place of each adapter's limits in the order from tight to wide, int64 (n,): by ITL, then by TTFT. Of more
        than `MOST_KINDS` different limits, neighbours share a place, but not those that differ most in ratio."""
        if not self.classes:
            return np.zeros(len(workload), dtype=np.int64)
        columns = [self.column(workload, key) for key in reversed(self.every_key)]
        rows = np.log(np.array([np.ones(len(workload)), *(np.minimum(each, 1e9) for each in columns)]))
        values, found = np.unique(rows, axis=1, return_inverse=True)
        gaps = np.abs(np.diff(values)).sum(axis=0)
        ends = np.sort(np.argsort(-gaps, kind="stable")[: MOST_KINDS - 1])
        return np.searchsorted(ends, found.reshape(-1))

    def of_requests(self, workload: Workload) -> dict[str, FloatArray]:
        """Limits that decide whether a request is within the goal: by metric, for each adapter, float64 (n,) each, ms.
        The limits of requests are used if the goal has any. Else the limit of a metric is the widest that the adapter
        has."""
        return _LIMITS(workload) if workload.slo is self else self._of_requests(workload)

    def _of_requests(self, workload: Workload) -> dict[str, FloatArray]:
        own = self.keys("request")
        if own:
            return {metric(key): self.column(workload, key) for key in own}
        found: dict[str, list[FloatArray]] = {}
        for key in (*self.keys("adapter"), *self.keys("server")):
            found.setdefault(metric(key), []).append(self.column(workload, key))
        widest = {name: np.max(np.where(np.isinf(each), 0.0, each), axis=0) for name, each in found.items()}
        return {name: np.where(column > 0.0, column, math.inf) for name, column in widest.items()}

    @property
    def share(self) -> float:
        """Share of the requests that must keep `of_requests`: the lowest quantile that an adapter or server limit names
        (p95: 0.95); `request_share` if no limit names a quantile or if the goal has limits of requests."""
        named = [STATISTICS.get(key.rpartition(".")[2].partition("_")[0], math.nan) for key in self.every_key]
        known = [] if self.keys("request") else [each for each in named if not math.isnan(each)]
        return min(known, default=self.request_share)

    def columns(self, workload: Workload) -> tuple[FloatArray, FloatArray]:
        """Limits of a request of each adapter, ms: of its TTFT, and of its mean gap between output tokens."""
        known, none = self.of_requests(workload), np.full(len(workload), math.inf)
        gaps = [known[name] for name in ("itl", "tpot") if name in known] or [none]
        return known.get("ttft", none), np.min(gaps, axis=0)

    @property
    def is_none(self) -> bool:
        """Whether the goal has no limits."""
        return not self.classes and self.limits == Limits.only({})

    def __str__(self) -> str:
        parts = []
        if mine := self.limits.at("adapter"):
            every = self.adapter_share == 1.0
            who = "every adapter" if every else f"{100 * self.adapter_share:g} % of the adapters"
            parts.append(f"{Limits.only(mine)} for {who}")
        if of_requests := self.limits.at("request"):
            parts.append(f"{Limits.only(of_requests)} for {100 * self.request_share:g} % of the requests")
        if of_servers := self.limits.at("server"):
            parts.append(str(Limits.only(of_servers)))
        parts += [f"{name}: {limits}" for name, limits in self.classes]
        return "; ".join(parts) or "no latency limits"


GoalLike = Goal | str | Mapping[str, float]  # What functions accept as a goal (`Goal.changed_by`).


def assignments(text: str, known: Iterable[str] = KEYS) -> dict[str, float]:
    """Parse KEY=VALUE,… A value that is not a number stays text, which the check of its key refuses later. Raises
    `ValidationError`: a part has another form, an unknown key, or a repeated key."""
    known, values = tuple(known), {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        key = SPELLINGS.get(key.strip(), key.strip())
        if not equals or key not in known:
            words = sorted(key.split("_"))
            near = [each for each in known if sorted(each.split("_")) == words]  # ttft_p95_ms
            near = near or difflib.get_close_matches(key, known, n=1)
            hint = f" Did you mean {near[0]}?" if near and equals else ""
            raise ValidationError(
                f"Expected a latency goal as [CLASS:]KEY=VALUE,… such as p95_ttft_ms=500,mean_itl_ms=50, got "
                f"{shown(text)}.{hint} Keys: {', '.join(OF_REQUESTS)} (of each request); {'_, '.join(STATISTICS)}_ "
                "before ttft_ms, itl_ms, tpot_ms, e2e_ms (of each adapter; server.p99_ttft_ms: of each server); "
                f"{', '.join(SHARES)} (not of a class)."
            )
        if key in values:
            raise ValidationError(f"Expected each limit once, got {key} twice in {shown(text)}.")
        values[key] = _number(value)
    return values


def _number(text: str) -> float:
    try:
        return checks.decimal(text)
    except ValueError:
        return text  # type: ignore[return-value]


Slo = Goal  # Alias of `Goal`.
_LIMITS = Memo["Workload", dict[str, FloatArray]](lambda workload: workload.slo._of_requests(workload), kept=64)  # noqa: SLF001
"""`Goal.of_requests` of a workload's own goal, which each simulated hour asks for several times."""
