"""Attainment and goodput, against the definition request by request."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from packer.cluster import Cluster
from packer.goal import Slo
from packer.twin.cluster.simulate import simulate_cluster
from packer.twin.simulate import simulate

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


@pytest.mark.parametrize("limits", [*[(name,) for name in LIMITS], tuple(LIMITS)])
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
        tokens = sum(row["input_tokens"] + row["output_tokens"] for row, v in zip(table, results, strict=True) if v)
        assert run.goodput_tok_s == pytest.approx(tokens / found.duration_s)
        shares.append(run.slo_attainment)
    assert any(0.0 < share < 1.0 for share in shares)


def test_without_limits_of_its_own_a_cluster_is_held_to_those_of_the_fleet(case: Callable[..., Any]) -> None:
    """One server has the same attainment and goodput as a cluster of one; a cluster's own limits replace them."""
    shares = []
    for seed in range(12):
        found = case(seed)
        kind = found.cluster.kinds[0]
        fleet = replace(found.workload, slo=Slo.of(40.0, 12.0))
        slots = {"max_loras": kind.max_loras, "max_lora_rank": 32}
        alone = simulate(fleet, kind.profile, **slots, duration_s=found.duration_s)
        if alone.status != "ok":
            continue
        cluster = Cluster.of(kind.profile, 1, **slots)
        run = simulate_cluster(fleet, cluster, duration_s=found.duration_s)
        for name in ("slo_attainment", "goodput_tok_s"):
            assert run.to_dict()[name] == alone.to_dict()[name], name
        shares.append(alone.slo_attainment)
        limited = simulate_cluster(fleet, replace(cluster, slo={"ttft_ms": 1e9}), duration_s=found.duration_s)
        assert limited.slo_attainment == 1.0 or math.isnan(limited.slo_attainment)
    assert any(0.0 < share < 1.0 for share in shares)
