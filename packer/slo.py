"""Service-level objectives: the latency limits of each adapter, by class."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np

from packer import checks
from packer.arrays import FloatArray
from packer.errors import ValidationError, shown

if TYPE_CHECKING:
    from packer.workload import Workload


@dataclass(frozen=True, slots=True)
class Limits:
    """Latency limits of an adapter, ms: the 95th percentile of its TTFT, and its mean ITL."""

    p95_ttft_ms: float = 2000.0
    mean_itl_ms: float = 100.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = checks.real(each.name, getattr(self, each.name), low=0.0, open_low=True)
            object.__setattr__(self, each.name, value)

    def __str__(self) -> str:
        ttft = f"{self.p95_ttft_ms:g} ms" if self.p95_ttft_ms < 1000 else f"{self.p95_ttft_ms / 1000:g} s"
        return f"p95 TTFT <= {ttft} and mean ITL <= {self.mean_itl_ms:g} ms"


@dataclass(frozen=True, slots=True)
class Slo:
    """What every adapter, or a share of them, is meant to keep.

    Parameters
    ----------
    limits
        Of adapters without a class.
    classes
        Limits of the adapters whose `slo_class` has that name: a mapping, or pairs.
    adapter_share
        Share of the adapters that must keep their limits, in ]0, 1].
    """

    limits: Limits = Limits()
    classes: tuple[tuple[str, Limits], ...] = ()
    adapter_share: float = 1.0

    def __post_init__(self) -> None:
        pairs = self.classes.items() if isinstance(self.classes, Mapping) else self.classes
        named = {checks.name("the name of a class", name): limits for name, limits in pairs}
        object.__setattr__(self, "classes", tuple(sorted(named.items())))
        share = checks.real("adapter_share", self.adapter_share, low=0.0, high=1.0, open_low=True)
        object.__setattr__(self, "adapter_share", share)

    @classmethod
    def of(cls, p95_ttft_ms: float = 2000.0, mean_itl_ms: float = 100.0) -> Slo:
        """The same limits for every adapter."""
        return cls(Limits(p95_ttft_ms, mean_itl_ms))

    def parsed(self, texts: Iterable[str]) -> Slo:
        """This one, changed by texts as "p95_ttft_ms=500,adapter_share=0.95" or "CLASS:mean_itl_ms=50".

        A class takes what it does not name from the limits of adapters without a class.

        Raises `ValidationError`: a text has another form, or a value breaks a rule.
        """
        limits, share, classes = self.limits, self.adapter_share, dict(self.classes)
        given = [_assignments(text) for text in texts]
        for name, values in given:
            if not name:
                share = values.pop("adapter_share", share)
                limits = replace(limits, **values)
        for name, values in given:
            if name:
                classes[name] = replace(classes.get(name, limits), **values)
        return Slo(limits, tuple(classes.items()), share)

    def check(self, workload: Workload) -> None:
        """Raise `ValidationError` where an adapter is of a class without limits."""
        known = dict(self.classes)
        for adapter in workload.adapters:
            if adapter.slo_class is not None and adapter.slo_class not in known:
                name = adapter.slo_class
                raise ValidationError(
                    f"Expected limits for the slo_class {shown(name)} of adapter {shown(adapter.name)}: give them "
                    f"with --slo {name}:p95_ttft_ms=500,mean_itl_ms=50, or slo = […] in packer.toml."
                )

    def columns(self, workload: Workload) -> tuple[FloatArray, FloatArray]:
        """Limits of p95 TTFT and of mean ITL of each adapter, float64 (n,) each, ms.

        A class that is not known has the limits of adapters without a class.
        """
        if not self.classes:
            n = len(workload)
            return np.full(n, self.limits.p95_ttft_ms), np.full(n, self.limits.mean_itl_ms)
        known = dict(self.classes)
        rows = [known.get(adapter.slo_class or "", self.limits) for adapter in workload.adapters]
        return np.array([row.p95_ttft_ms for row in rows]), np.array([row.mean_itl_ms for row in rows])

    def __str__(self) -> str:
        who = (
            "every adapter"
            if self.adapter_share == 1.0
            else f"{100 * self.adapter_share:g} % of the adapters"
        )
        classes = "".join(f"; {name}: {limits}" for name, limits in self.classes)
        return f"{self.limits} for {who}{classes}"


def _assignments(text: str) -> tuple[str, dict[str, float]]:
    """The class, "" if none is named, and the values of one text."""
    name, colon, rest = text.rpartition(":")
    known = [each.name for each in fields(Limits)] + ([] if name else ["adapter_share"])
    values: dict[str, float] = {}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        try:
            values[key.strip()] = float(value)
        except ValueError:
            values[""] = 0.0
    if not set(values) <= set(known) or (colon and not name):
        raise ValidationError(
            f"Expected a latency goal as [CLASS:]KEY=VALUE,… with the keys {', '.join(known)}, got {shown(text)}."
        )
    return name, values
