"""Fingerprints of content."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from packer.adapter import Adapter
from packer.arrival import Arrivals, RequestTrace
from packer.fingerprint import fingerprint
from packer.lengths import Lengths
from packer.workload import Workload

FLEET = Workload([Adapter("a", 8, 0.5), Adapter("b", 16, 0.25)])


def _replay(second_s: float) -> Workload:
    whole = np.array([10, 20])
    trace = RequestTrace(np.array([0.5, second_s]), np.array([0, 1]), whole, whole)
    return FLEET.with_arrivals(Arrivals("trace", trace=trace))


def test_equal_content_has_one_fingerprint() -> None:
    """Types of numbers, the order of keys, empty parts and the workload's name do not count."""
    assert fingerprint(a=1, b={"x": 2.0, "y": (3,)}) == fingerprint(b={"y": [3.0], "x": 2}, a=1.0, c=None, d={})
    assert replace(FLEET, name="other").fingerprint == FLEET.fingerprint


def test_what_is_sent_counts() -> None:
    """Rates, ranks, lengths and every request of a trace change a workload's fingerprint."""
    changed = [
        FLEET.scaled(1.1),
        Workload([Adapter("a", 8, 0.5), Adapter("b", 8, 0.25)]),
        replace(FLEET, input_tokens=Lengths.empirical([5.0, 9.0])),
        replace(FLEET, input_tokens=Lengths.empirical([5.0, 10.0])),
        _replay(1.5),
        _replay(1.75),
    ]
    assert len({FLEET.fingerprint, *(each.fingerprint for each in changed)}) == 1 + len(changed)
