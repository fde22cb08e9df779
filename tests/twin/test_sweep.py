"""The sweep's grid, its fleets and its Max_pack."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from packer.adapter import Adapter
from packer.arrival import Arrivals, RequestTrace
from packer.engine_spec import EngineSpec
from packer.errors import ValidationError
from packer.lengths import Lengths
from packer.profile import GpuSpec, LatencySpec, MemorySpec, ModelSpec, Profile
from packer.twin.arrivals import draw_requests
from packer.twin.simulate import simulate
from packer.twin.sweep import Grid, Sweep, fleet_of, max_packs, sweep_frame, x_axis
from packer.workload import Workload


@pytest.fixture(scope="module")
def profile() -> Profile:
    """A small server: at most some ten slots of rank 16 leave room for the KV cache."""
    return Profile(
        "tests/small",
        ModelSpec("small", 1e9, 1e5, 1e6),
        GpuSpec("small", 8e9),
        EngineSpec("vllm", "0", max_model_len=2048, max_num_batched_tokens=1024, max_num_seqs=64),
        MemorySpec(4e9, 0.0, 2e7, min_kv_tokens=2048),
        LatencySpec("linear", {"base_ms": 10.0, "per_decode_ms": 0.2, "per_prefill_token_ms": 0.05}),
        calibrated=True,
    )


@pytest.fixture(scope="module")
def fleet() -> Workload:
    """Eight adapters of ranks 8 and 16, half a request a second each."""
    adapters = [Adapter(f"a{i}", rank=16 if i == 7 else 8, rate=0.5) for i in range(8)]
    return Workload(adapters, Lengths.gamma(100, 1.0), Lengths.gamma(50, 1.0), name="eight")


def _sweep(fleet: Workload, profile: Profile, grid: Grid, seed: int = 0) -> Sweep:
    return Sweep(fleet, profile, grid, duration_s=120.0, seed=seed)


def test_fleet_takes_the_first_adapters(fleet: Workload) -> None:
    """Up to the workload's own number, a fleet of n is its first n adapters, and all of it is itself."""
    assert fleet_of(fleet, 3, seed=0).adapters == fleet.adapters[:3]
    assert fleet_of(fleet, 8, seed=0) is fleet


def test_larger_fleet_repeats_the_mix(fleet: Workload) -> None:
    """Beyond its own number a fleet grows by copies of its adapters, one at a time, the same for a seed."""
    big = fleet_of(fleet, 40, seed=3)
    assert big.adapters[:25] == fleet_of(fleet, 25, seed=3).adapters
    assert len(set(big.names)) == 40
    originals = {(a.rank, a.rate) for a in fleet.adapters}
    assert {(a.rank, a.rate) for a in big.adapters} == originals
    assert big.adapters != fleet_of(fleet, 40, seed=4).adapters


def test_copies_never_take_a_name_twice() -> None:
    """An adapter that is already called like a copy, or as long as names may be, keeps its name to itself."""
    long = "x" * 256
    fleet = Workload([Adapter("a", 8, 1.0), Adapter("a~1", 8, 1.0), Adapter(long, 8, 1.0)])
    names = fleet_of(fleet, 60, seed=0).names
    assert len(set(names)) == 60
    assert max(map(len, names)) == 256


def test_trace_has_no_copies(fleet: Workload) -> None:
    """A replayed trace holds requests of its own adapters only: asking for more is an error."""
    import numpy as np

    one = np.array([1])
    trace = RequestTrace(np.array([0.5]), np.array([0]), one.copy(), one.copy())
    replayed = fleet.with_arrivals(Arrivals("trace", trace=trace))
    assert len(fleet_of(replayed, 8, seed=0)) == 8
    with pytest.raises(ValidationError, match="8 adapters only"):
        fleet_of(replayed, 9, seed=0)


def test_row_is_what_simulate_says(fleet: Workload, profile: Profile) -> None:
    """A row of the sweep is the simulation of its point, with the slot rank of the whole workload."""
    sweep = _sweep(fleet, profile, Grid((4,), (2.0,), (4,)))
    row = sweep.row((4, 2.0, 4))
    sim = simulate(fleet.subset(range(4)).scaled(2.0), profile, max_loras=4, max_lora_rank=16, duration_s=120.0, seed=0)
    assert row["max_lora_rank"] == 16
    assert row["total_token_throughput"] == sim.total_token_throughput
    assert row["mean_itl_ms"] == sim.mean_itl_ms
    assert row["starved"] == sim.starved
    lowest = [replace(each, rank=1) for each in fleet.adapters]
    assert _sweep(replace(fleet, adapters=lowest), profile, Grid((4,), (2.0,), (4,))).max_lora_rank == 8


def test_a_replayed_trace_is_swept_over_its_own_time(fleet: Workload, profile: Profile) -> None:
    """Without a duration a row is what `simulate` says without one: the load of ten minutes is no load of an hour."""
    trace = replace(draw_requests(fleet, 20.0, 0), end_s=20.0)
    replayed = fleet.replaying(trace)
    for factor in (1.0, 2.0):
        row = Sweep(replayed, profile, Grid((8,), (factor,), (8,))).row((8, factor, 8))
        sim = simulate(replayed.scaled(factor), profile, max_loras=8, max_lora_rank=16)
        assert row["offered_tok_s"] == sim.offered_tok_s
        assert row["offered_tok_s"] == pytest.approx(factor * sim.sent_tokens / 20.0)


def test_threads_change_nothing(fleet: Workload, profile: Profile) -> None:
    """Rows come in the grid's order and are the same with one thread and with several."""
    sweep = _sweep(fleet, profile, Grid((2, 4, 8), (1.0, 2.0), (4, 8)))
    assert sweep.run(jobs=2).equals(sweep.run(jobs=1), null_equal=True)


def test_max_pack_is_the_fullest_that_works(fleet: Workload, profile: Profile) -> None:
    """Max_pack neither starves nor fails, and no feasible row of its curve is offered more."""
    frame = _sweep(fleet, profile, Grid(tuple(range(8, 81, 8)), (1.0,), (2, 8, 1000))).run(jobs=2)
    packs = max_packs(frame)
    assert packs["max_loras"].to_list() == [2, 8]  # a thousand slots leave no memory
    for pack in packs.iter_rows(named=True):
        curve = frame.filter((frame["max_loras"] == pack["max_loras"]) & ~frame["starved"] & ~frame["memory_error"])
        assert not pack["starved"]
        assert pack["adapters"] == curve["adapters"].max()
    assert frame.filter(frame["max_loras"] == 8)["starved"].any()


def test_memory_error_is_a_row(fleet: Workload, profile: Profile) -> None:
    """A server that does not start is a row without latencies, not an exception."""
    frame = _sweep(fleet, profile, Grid((8,), (1.0,), (1000,))).run()
    row = frame.row(0, named=True)
    assert row["memory_error"]
    assert math.isnan(row["mean_ttft_ms"])
    assert max_packs(frame).is_empty()


def test_x_axis_is_the_one_that_varies(fleet: Workload, profile: Profile) -> None:
    """Curves run over adapters if they vary, else over the rate factor, else over max_loras."""
    for grid, axis in [
        (Grid((2, 4), (1.0, 2.0), (4, 8)), "adapters"),
        (Grid((2,), (1.0, 2.0), (4, 8)), "rate_factor"),
        (Grid((2,), (1.0,), (4, 8)), "max_loras"),
        (Grid((2,), (1.0,), (4,)), "adapters"),
    ]:
        assert x_axis(_sweep(fleet, profile, grid).run()) == axis


@pytest.mark.parametrize(
    ("adapters", "factors", "slots"),
    [
        ((0,), (1.0,), (8,)),
        ((1,), (0.0,), (8,)),
        ((1,), (math.nan,), (8,)),
        ((1,), (1.0,), (0,)),
        ((), (1.0,), (8,)),
    ],
)
def test_grid_refuses_nonsense(adapters: tuple[int, ...], factors: tuple[float, ...], slots: tuple[int, ...]) -> None:
    """No adapters, a rate factor that is no positive number, no slots or an empty axis is an error."""
    with pytest.raises(ValidationError):
        Grid(adapters, factors, slots)


def test_slots_must_hold_the_adapters(fleet: Workload, profile: Profile) -> None:
    """A slot rank below the largest adapter is refused before anything is simulated."""
    with pytest.raises(ValidationError, match="max_lora_rank"):
        Sweep(fleet, profile, Grid((1,), (1.0,), (4,)), max_lora_rank=8)


def test_frame_survives_a_file(fleet: Workload, profile: Profile, tmp_path: Path) -> None:
    """Rows written as CSV and read back with the frame's schema are the same rows."""
    import polars as pl

    frame = _sweep(fleet, profile, Grid((2, 8), (1.0,), (4, 1000))).run()
    frame.write_csv(tmp_path / "rows.csv")
    again = pl.read_csv(tmp_path / "rows.csv", schema=sweep_frame([]).schema)
    assert again.fill_nan(None).equals(frame.fill_nan(None), null_equal=True)
