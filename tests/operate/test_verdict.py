"""The sentence after a comparison: best within noise, by how much, why."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from packer.adapter import Adapter
from packer.cluster import Cluster
from packer.operate.systems import FIGURES, SystemResult
from packer.operate.verdict import verdict
from packer.testing.analytic import small_profile
from packer.twin.uncertainty import interval
from packer.workload import Workload

FLEET = Workload([Adapter(f"a{i}", 8, 1.0) for i in range(8)])
CLUSTER = Cluster.of(small_profile(), 4, max_loras=4)


def result(name: str, kept: list[float], tpot_ms: float, tok_s: float = 1e5, served: float = 1.0) -> SystemResult:
    """A system with these shares by seed."""
    values = {figure: tuple([math.nan] * len(kept)) for figure in FIGURES}
    values |= {
        "slo_attainment": tuple(kept),
        "total_token_throughput": tuple([tok_s] * len(kept)),
        "mean_tpot_ms": tuple(tpot_ms + 0.1 * k for k in range(len(kept))),
        "served": tuple([served] * len(kept)),
    }
    return SystemResult(name, name, 4, {k: interval(np.array(v)) for k, v in values.items()}, values)


def test_the_best_is_named_with_its_lead() -> None:
    """A difference beyond chance in pairs of the same requests decides, however much seeds differ."""
    one, two = result("one", [0.99, 0.89, 0.95], 50.0), result("two", [0.98, 0.88, 0.94], 20.0)
    assert verdict(FLEET, CLUSTER, [two, one]).startswith(
        "one is best: 94.3% of the requests keep the SLO, 1.0 ± 0.0 points more than with two. Why: "
    )


def test_what_chance_may_explain_is_no_lead() -> None:
    """Systems within noise are named together, and the one whose TPOT is lower for certain."""
    one, two = result("one", [0.99, 0.95, 0.98], 50.0), result("two", [0.98, 0.97, 0.97], 20.0)
    last = result("last", [0.5, 0.51, 0.52], 10.0)
    said = verdict(FLEET, CLUSTER, [one, last, two])
    assert "within the noise of 3 seeds. Of these two has the lowest TPOT (20 ms). last follows" in said


def test_a_wide_interval_is_no_equality() -> None:
    """A system that fails on some seeds is not called as good because it varies much."""
    one, two = result("one", [1.0, 1.0, 1.0], 50.0), result("two", [0.995, 0.996, 0.995], 20.0)
    said = verdict(FLEET, CLUSTER, [one, two, result("wild", [1.0, 0.8, 0.99], 10.0)])
    assert said.startswith(
        "one is best in the mean: 100.0% of the requests keep the SLO, 0.5 ± 0.1 points more than with two."
    )
    assert "3 seeds do not tell whether wild (93.0%) would keep it for as many: give more --seeds. Why" in said
    few = verdict(FLEET, CLUSTER, [result("one", [1.0, 1.0], 50.0), result("bad", [0.7, 0.6], 20.0)])
    assert "one is best: 100.0% of the requests keep the SLO, 35.0 points more than with bad, on each of 2 seeds" in few


def test_systems_without_token_times_are_left_out() -> None:
    """Whole jobs have no TPOT: their systems are named, not compared."""
    one, two = result("one", [0.9] * 3, 50.0), result("two", [0.9] * 3, 20.0)
    whole = result("whole", [1.0] * 3, math.nan)
    said = verdict(FLEET, CLUSTER, [one, whole, two])
    assert "Of these two has the lowest TPOT" in said
    assert said.endswith("Without token times, and so not compared: whole.")


def test_without_an_slo_the_tpot_decides() -> None:
    """Nothing is said of requests that keep limits."""
    one, two = result("one", [math.nan] * 3, 50.0), result("two", [math.nan] * 3, 20.0)
    assert verdict(FLEET, CLUSTER, [one, two]) == "Lowest TPOT: two (20 ms); next one (50 ms)."
    assert verdict(FLEET, CLUSTER, [one]) == ""


@pytest.mark.parametrize(
    ("rates", "slots", "tok_s", "words"),
    [
        (
            [9.0, *[1.0] * 7],
            4,
            (1e5, 1e5),
            "adapter 'a0' has 56% of the load, what one of 4 equal servers gets or more",
        ),
        ([1.0] * 8, 8, (1e5, 1e5), "every adapter has a slot on each server"),
        ([1.0] * 8, 4, (1e5, 1e5), "8 adapters share 4 slots"),
        ([1.0] * 8, 4, (100.0, 99.0), "the servers are overloaded: what keeps its queues equal"),
        ([1.0] * 8, 4, (100.0, 90.0), "the servers are overloaded: adapters on few servers"),
        ([1.0] * 8, 4, (90.0, 100.0), "the servers are overloaded."),
    ],
)
def test_the_reason_is_the_fleets(rates: list[float], slots: int, tok_s: tuple[float, float], words: str) -> None:
    """A hot adapter, few adapters, many adapters, too much load; requests still in flight at the end are no load."""
    fleet = Workload([Adapter(f"a{i}", 8, rate) for i, rate in enumerate(rates)])
    served = 0.5 if "overloaded" in words else 1.0
    rows = [result("one", [0.9] * 3, 50.0, tok_s[0], served), result("two", [0.8] * 3, 20.0, tok_s[1], served)]
    assert words in verdict(fleet, Cluster.of(small_profile(), 4, max_loras=slots), rows)


def test_servers_that_do_not_start_are_named_with_the_reason() -> None:
    """They are not among the systems without token times."""
    dead = [replace(result(name, [math.nan], math.nan), failed="no memory") for name in ("one", "two")]
    jobs, fine = result("jobs", [1.0], math.nan), [result(name, [1.0], 10.0) for name in ("three", "four")]
    assert verdict(FLEET, CLUSTER, [*dead, fine[0], jobs]) == (
        "Without token times, and so not compared: jobs. The servers of one, two do not start: no memory."
    )
    assert ". The servers of one, two do not start" in verdict(FLEET, CLUSTER, [*dead, *fine])
