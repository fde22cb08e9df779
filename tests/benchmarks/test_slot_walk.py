"""The plain walk over vLLM's adapter slots does what the source of vLLM 0.32 does, by hand-made cases."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from packer.arrival import RequestTrace

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "real_vllm"))
from slot_walk import SetOrder, Slots, StepLaw, predict, read_walks, replay


def full(sparing: bool = False, host: int = 100) -> Slots:
    """Four slots that hold the batch 1 2 3 4, walked in this order in the last step."""
    slots = Slots(4, host, sparing)
    assert slots.step([1, 2, 3, 4]) == ([1, 2, 3, 4], [1, 2, 3, 4])
    return slots


@pytest.mark.parametrize(
    ("walk", "loads"),
    [
        ([5, 2, 3, 4], [5]),  # 1 has left and is the oldest
        ([1, 5, 3, 4], [5]),  # 2 has left; 1 is touched before 5 comes
        ([5, 1, 2, 3], [5, 1, 2, 3]),  # 4 has left: 5 evicts 1, which evicts 2, …, until 4 goes
        ([1, 5, 2, 3], [5, 2, 3]),
        ([1, 2, 3, 5], [5]),
    ],
)
def test_a_new_adapter_evicts_running_ones(walk: list[int], loads: list[int]) -> None:
    """Slots are full but for one that has left: the oldest not yet touched in this walk goes, running or not."""
    assert full().step(walk)[0] == loads
    assert full(sparing=True).step(walk)[0] == [5]


def test_an_idle_adapter_stops_the_cascade() -> None:
    """Where a resident adapter was idle for a step, it is the oldest and nothing else is evicted."""
    slots = full()
    slots.step([1, 2, 3])
    assert slots.step([5, 1, 2, 3])[0] == [5]


def test_with_as_many_adapters_in_host_memory_as_slots_every_load_comes_from_disk() -> None:
    """Registry and slots evict the same adapter: the cascade reads each of its adapters from disk."""
    assert full(host=4).step([5, 1, 2, 3]) == ([5, 1, 2, 3], [5, 1, 2, 3])
    assert full(host=5).step([5, 1, 2, 3]) == ([5, 1, 2, 3], [5])


def test_a_set_is_walked_in_the_same_order_while_its_members_stay() -> None:
    """The order is arbitrary, depends on the seed and keeps from step to step."""
    order = SetOrder(0)
    first = order.walk(range(12))
    assert sorted(first) == list(range(12))
    assert order.walk(range(12)) == first
    assert SetOrder(1).walk(range(12)) != first


def test_a_log_is_read_and_replayed(tmp_path: Path) -> None:
    """Times and ids come back, a line cut short is dropped, and the replay counts what the log says."""
    path = tmp_path / "walks.txt"
    path.write_text("1.5;1 2;1 2;1 2\n2.5;3 1;3 1;3\n3.5;1")
    walks = read_walks(path)
    assert [walk.start_s for walk in walks] == [1.5, 2.5]
    assert replay(walks, Slots(2, 10)) == [(len(w.activated), len(w.loaded)) for w in walks] == [(2, 2), (2, 1)]


def test_the_simulated_server_admits_no_adapter_beyond_its_slots() -> None:
    """Three requests of two tokens, one slot: the second adapter waits, the third request is served before it."""
    zero = np.zeros(3, dtype=np.int64)
    requests = RequestTrace(np.zeros(3), np.array([0, 1, 0]), zero + 4, zero + 2)
    law = StepLaw(base_ms=10.0, token_ms=0.0, adapter_ms=0.0, load_ms=0.0, disk_ms=0.0)
    found = predict(requests, Slots(1, 2), law, duration_s=1.0, max_num_seqs=8, max_num_batched_tokens=64)
    assert (found.steps, found.loads, found.completed, found.tokens) == (4, 2, 3, 18)
    assert found.mean_adapters == 1.0


def test_a_slow_second_delays_its_steps() -> None:
    """Steps of 125 ms: eight in the first second, four in the second one, which is half as fast."""
    zero = np.zeros(1, dtype=np.int64)
    requests = RequestTrace(np.zeros(1), zero, zero + 1, zero + 50)
    law = StepLaw(base_ms=125.0, token_ms=0.0, adapter_ms=0.0, load_ms=0.0, disk_ms=0.0)
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64}
    for end_s, steps in ((0.95, 8), (1.95, 12)):
        found = predict(requests, Slots(1, 1), law, duration_s=end_s, slowdown=(1.0, 2.0), **limits)
        assert found.steps == steps
