"""Fit the memory and loading models to measured tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from packer.engine_spec import EngineSpec
from packer.errors import ModelError
from packer.fit.step_law import non_negative
from packer.fit.tables import positive, whole
from packer.io.tables import Row
from packer.profile import LoadingSpec, MemorySpec, ModelSpec
from packer.twin.memory.policy import least_kv_tokens


def fit_memory(rows: Sequence[Row], model: ModelSpec, engine: EngineSpec) -> MemorySpec:
    """Fit KV bytes to slots and slots × rank by least squares; measured points are stored and stay exact. Raises
    `ModelError`: fewer than three measured capacities."""
    points = [(whole(row, "max_loras"), whole(row, "max_lora_rank"), whole(row, "kv_cache_tokens")) for row in rows]
    if len(points) < 3:
        raise ModelError(f"Expected at least 3 measured KV capacities, got {len(points)}.")
    slots, ranks, tokens = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
    design = np.column_stack([np.ones_like(slots), -slots, -slots * ranks])
    budget, per_slot, per_rank = np.linalg.lstsq(design, tokens * model.kv_bytes_per_token, rcond=None)[0]
    if per_slot < 0:  # slots can't give memory back: the rank alone explains what they cost
        design = design[:, [0, 2]]
        budget, per_rank = np.linalg.lstsq(design, tokens * model.kv_bytes_per_token, rcond=None)[0]
        per_slot = 0.0
    if per_rank < 0:
        rows[0].fail("kv_cache_tokens", "expected fewer tokens with slots of larger ranks, got more.")
    return MemorySpec(
        kv_budget_bytes=float(np.round(budget)),
        slot_bytes=float(np.round(per_slot)),
        slot_bytes_per_rank=float(np.round(per_rank)),
        min_kv_tokens=least_kv_tokens(model, engine),
        measured=tuple(sorted(points)),
    )


def fit_loading(rows: Sequence[Row]) -> LoadingSpec:
    """Fit lines a + b × rank to the measured load times; neither a nor b is negative."""
    rank = np.array([positive(row, "adapter_rank") for row in rows])
    lines = []
    for column in ("gpu_load_mean_ms", "disk_load_mean_ms"):
        ms = np.array([positive(row, column) for row in rows])
        several = len(set(rank.tolist())) > 1
        base, slope = non_negative(np.column_stack([np.ones_like(rank), rank * several]), ms)
        lines += [round(float(base), 4), round(float(slope), 6)]
    host_base, host_slope, disk_base, disk_slope = lines
    return LoadingSpec(host_base, host_slope, disk_base, disk_slope)
