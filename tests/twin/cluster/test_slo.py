"""Attainment and goodput, against the definition request by request."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from packer.cluster import SLO_LIMITS
from packer.twin.cluster.simulate import simulate_cluster

LIMITS = {"ttft_ms": 40.0, "tpot_ms": 12.0, "normalised_ms": 25.0, "latency_ms": 150.0}


def _kept(row: dict[str, Any], end_s: float, slo: dict[str, float]) -> bool | None:
    """True: kept; False: over a limit; None: not decided by the end."""
    first = end_s if row["first_s"] is None else row["first_s"]
    finish = end_s if row["finish_s"] is None else row["finish_s"]
    tokens = row["output_tokens"]
    found = {
        "ttft_ms": first - row["sent_s"],
        "tpot_ms": (finish - first) / (tokens - 1) if tokens > 1 else 0.0,
        "normalised_ms": (finish - row["sent_s"]) / tokens,
        "latency_ms": finish - row["sent_s"],
    }
    if any(found[name] * 1e3 > limit for name, limit in slo.items()):
        return False
    return True if row["finish_s"] is not None else None


@pytest.mark.parametrize("limits", [*[(name,) for name in SLO_LIMITS], SLO_LIMITS])
def test_attainment_and_goodput_are_the_definition(limits: tuple[str, ...], case: Callable[..., Any]) -> None:
    """A request keeps the SLO if it keeps every limit; those undecided at the end are left out."""
    slo = {name: LIMITS[name] for name in limits}
    shares = []
    for seed in range(12):
        found = case(seed)
        run = simulate_cluster(found.workload, found.cluster, duration_s=found.duration_s, slo=slo)
        if run.status != "ok":
            continue
        table = run.requests.to_dicts()
        results = [_kept(row, found.duration_s, slo) for row in table]
        decided = [v for v in results if v is not None]
        assert run.slo_attainment == pytest.approx(sum(decided) / len(decided))
        tokens = sum(
            row["input_tokens"] + row["output_tokens"] for row, v in zip(table, results, strict=True) if v
        )
        assert run.goodput_tok_s == pytest.approx(tokens / found.duration_s)
        shares.append(run.slo_attainment)
    assert any(0.0 < share < 1.0 for share in shares)


def test_without_an_slo_there_is_no_attainment(case: Callable[..., Any]) -> None:
    """No limits: the figures are NaN, and null in the summary; a cluster's own limits are the default."""
    found = case(1)
    run = simulate_cluster(found.workload, found.cluster, duration_s=1.0)
    assert math.isnan(run.slo_attainment)
    assert run.to_dict()["goodput_tok_s"] is None
