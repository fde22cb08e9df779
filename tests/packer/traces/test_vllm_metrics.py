"""Adapters in vLLM's own metrics."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest

from packer.errors import FileFormatError
from packer.traces.prometheus import SOURCES, parse
from packer.traces.vllm_metrics import Series, mean_load_ms, ranks_of, shares_in_flight, shares_resident


def info(names: str, times: list[float], instance: str = "a") -> tuple[dict[str, str], list[tuple[float, float]]]:
    """A list of adapters in flight, current at these times, as vLLM 0.32 writes it: both labels alike."""
    labels = {"running_lora_adapters": names, "waiting_lora_adapters": names, "max_lora": "4"}
    return {**labels, "instance": instance}, [(time, time) for time in times]


def loaded(
    name: str, times: list[float], *, level: str = "gpu", instance: str = "a", rank: str = "16"
) -> tuple[dict[str, str], list[tuple[float, float]]]:
    """An adapter that is loaded at these times."""
    labels = {"adapter_name": name, "level": level, "pinned": "false", "rank": rank, "instance": instance}
    return labels, [(time, 1.0) for time in times]


def test_identical_lists_count_once() -> None:
    """Where running and waiting adapters are the same list, an adapter in flight is seen once a sample."""
    shares = shares_in_flight([info("a,b", [1, 2]), info("a", [3]), info("", [4])])
    a, b = np.log(1 - 3 / 4), np.log(1 - 2 / 4)
    assert shares == pytest.approx({"a": a / (a + b), "b": b / (a + b)})


def test_each_server_has_its_own_list() -> None:
    """A list of one server does not hide that of another, and an adapter on both counts on both."""
    series = [
        info("a", [1, 2], "one"),
        info("", [3, 4], "one"),
        info("a,b", [1.5, 2.5], "two"),
        info("b", [3.5, 4.5], "two"),
    ]
    shares = shares_in_flight(series)
    a = -2 * np.log(1 / 2)
    b = -np.log(1 - 3.5 / 4)
    assert shares == pytest.approx({"a": a / (a + b), "b": b / (a + b)})


def test_residency_gives_the_shares_of_an_lru_cache() -> None:
    """Sampled residency of 40 adapters in 12 slots of an LRU cache gives back their rates (Che's approximation)."""
    rng = np.random.default_rng(3)
    rates = 1.0 / np.arange(1, 41)
    rates *= 4.0 / rates.sum()
    slots: OrderedDict[int, None] = OrderedDict()
    seen: dict[int, list[float]] = {k: [] for k in range(40)}
    times_s = np.cumsum(rng.exponential(1 / rates.sum(), 160_000)).tolist()
    sample_s = 15.0
    for now_s, k in zip(times_s, rng.choice(40, 160_000, p=rates / rates.sum()).tolist(), strict=True):
        while sample_s < now_s:
            for held in slots:
                seen[held].append(sample_s)
            sample_s += 15.0
        slots[k] = None
        slots.move_to_end(k)
        if len(slots) > 12:
            slots.popitem(last=False)
    shares = shares_resident([loaded(f"a{k}", times) for k, times in seen.items()])
    for k in range(2, 40):  # the two hottest are there nearly always
        assert shares[f"a{k}"] / shares["a5"] == pytest.approx(rates[k] / rates[5], rel=0.2)


def test_adapters_that_never_leave_their_slots_are_not_told_apart() -> None:
    """Where slots are enough for all, residency says nothing of rates: that is an error with a way out."""
    series = [loaded("a", [1, 2]), loaded("b", [1, 2])]
    with pytest.raises(FileFormatError, match="gateway's metrics or an access log"):
        shares_resident(series)
    with pytest.raises(FileFormatError, match="no adapter was in a slot"):
        shares_resident([loaded("a", [1, 2], level="cpu")])


def test_host_memory_is_no_slot() -> None:
    """An adapter that waits in host memory has no share of the work at that time."""
    series: Series = [
        loaded("a", [1, 2, 3]),
        loaded("b", [1]),
        loaded("b", [2, 3], level="cpu"),
        loaded("c", [1, 2, 3], level="cpu"),
    ]
    shares = shares_resident(series)
    assert set(shares) == {"a", "b"}
    assert shares["a"] > shares["b"]


def test_ranks_and_load_times() -> None:
    """Ranks come from the label, where it is one; a load's time is the sum over the count."""
    series = [loaded("a", [1], rank="8"), loaded("b", [1], rank=""), loaded("c", [1], rank="9999")]
    assert ranks_of(series) == {"a": 8}
    assert mean_load_ms([({}, [(1, 0.5), (2, 0.25)])], [({}, [(1, 2.0), (2, 1.0)])]) == pytest.approx(250)
    assert mean_load_ms([], []) is None


def answer(series: Series) -> dict[str, Any]:
    """An answer of query_range."""
    result = [{"metric": dict(labels), "values": [[t, str(v)] for t, v in points]} for labels, points in series]
    return {"status": "success", "data": {"resultType": "matrix", "result": result}}


def test_a_server_without_the_old_gauge_is_read_by_its_slots() -> None:
    """Where vllm:lora_requests_info is gone, shares, ranks and load times come from the newer metrics."""
    counted = {
        name: answer([({}, [(60.0, total)])])
        for name, total in (("requests", 60.0), ("input_tokens", 6000.0), ("output_tokens", 600.0))
    }
    found = parse(
        {
            "window_s": 60.0,
            **counted,
            "running": answer([]),
            "loaded": answer([loaded("a", [15, 30, 45]), loaded("b", [15, 60], rank="64")]),
            "load_sum": answer([({}, [(60.0, 0.3)])]),
            "load_count": answer([({}, [(60.0, 3.0)])]),
        },
        SOURCES["vllm"],
    )
    assert found.estimated
    assert found.table.names == ("a", "b")
    assert found.table.rates[0].sum() == pytest.approx(1.0)
    assert found.ranks == {"a": 16, "b": 64}
    assert found.load_ms == pytest.approx(100)
