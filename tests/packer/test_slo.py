"""Service-level objectives: limits by class, read from text, per adapter."""

from __future__ import annotations

from dataclasses import replace

import pytest

from packer.adapter import Adapter
from packer.errors import ValidationError
from packer.slo import Limits, Slo
from packer.workload import Workload


def test_texts_change_what_they_name() -> None:
    """A class takes what it does not name from adapters without a class, in whatever order the texts come."""
    slo = Slo().parsed(["chat:mean_itl_ms=50", "p95_ttft_ms=500,adapter_share=0.95"])
    assert slo == Slo(Limits(500.0, 100.0), (("chat", Limits(500.0, 50.0)),), 0.95)
    assert slo.parsed(["chat:p95_ttft_ms=200"]).classes == (("chat", Limits(200.0, 50.0)),)
    assert Slo().parsed([]) == Slo().parsed([""]) == Slo()


@pytest.mark.parametrize(
    "text",
    ["mean_itl=50", "p95_ttft_ms", "p95_ttft_ms=x", "p95_ttft_ms=0", "a:adapter_share=0.5", ":mean_itl_ms=5",
     "adapter_share=0", "adapter_share=1.5", "mean_itl_ms=nan"],
)  # fmt: skip
def test_other_texts_are_refused(text: str) -> None:
    """Anything but KEY=VALUE with a known key and a value in its range is refused with the rule."""
    with pytest.raises(ValidationError, match="Expected"):
        Slo().parsed([text])


def test_limits_of_each_adapter() -> None:
    """Adapters of a class get its limits, the others the plain ones; a class without limits is an error."""
    fleet = Workload([Adapter("a", 8, 1.0), Adapter("b", 8, 1.0, slo_class="batch")])
    with pytest.raises(ValidationError, match=r"'batch' of adapter 'b'.*--slo batch:"):
        fleet.slo.check(fleet)
    slo = Slo(Limits(300.0, 40.0)).parsed(["batch:p95_ttft_ms=60000"])
    slo.check(fleet)
    ttft_ms, itl_ms = slo.columns(fleet)
    assert ttft_ms.tolist() == [300.0, 60000.0]
    assert itl_ms.tolist() == [40.0, 40.0]


def test_a_workload_keeps_its_limits() -> None:
    """Parts and scaled versions of a fleet have its limits; so has the fingerprint, and the default changes nothing."""
    fleet = Workload([Adapter("a", 8, 1.0), Adapter("b", 8, 2.0)])
    strict = replace(fleet, slo=Slo.of(300.0))
    assert strict.subset([1]).slo == strict.scaled(2.0).slo == Slo.of(300.0)
    assert strict.fingerprint != fleet.fingerprint
    assert str(strict.slo) == "p95 TTFT <= 300 ms and mean ITL <= 100 ms for every adapter"
