"""Rules for every placement, whether a solver, a plug-in or a file made it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from packer.bin import Bin, indices
from packer.errors import ValidationError
from packer.gpu import serves
from packer.workload import Workload

SHARE_TOLERANCE = 1e-6


def check_placement(workload: Workload, bins: Sequence[Bin], unplaced: Sequence[int]) -> None:
    """Check that ranks and base models fit, and that each adapter is unplaced or has shares that sum to 1. Raises
    `ValidationError`: a rule is broken; the message names the rule, the server and the adapter."""
    n = len(workload)
    placed = np.zeros(n)
    for k, bin_ in enumerate(bins):
        index = indices(bin_.adapters)
        if (last := int(index.max())) >= n:
            raise ValidationError(f"server {k} holds adapter number {last}, which does not exist.")
        rank = int(workload.ranks[index].max())
        if bin_.max_lora_rank < rank:
            said = f"Expected max_lora_rank of server {k} >= {rank}, the largest rank of its adapters,"
            raise ValidationError(f"{said} got {bin_.max_lora_rank}.")
        if rank and not bin_.max_loras:
            raise ValidationError(f"Expected max_loras of server {k} >= 1, because it serves adapters, got 0.")
        for i in bin_.adapters if workload.models else ():
            model = workload.adapters[i].model
            if model is not None and not serves(bin_.profile.model, model):
                said = f"server {k} serves {bin_.profile.model.name!r},"
                raise ValidationError(f"{said} and its adapter {workload.names[i]!r} is for {model!r}.")
        placed[index] += np.array(bin_.shares)
    if not all(0 <= i < n for i in unplaced):
        raise ValidationError(f"An unplaced adapter is not one of the {n} of the workload.")
    expected = np.ones(n)
    expected[list(unplaced)] = 0.0
    for i in np.flatnonzero(np.abs(placed - expected) > SHARE_TOLERANCE).tolist():
        want = "unplaced" if expected[i] == 0 else "placed once (its shares sum to 1)"
        rule = f"Expected adapter {workload.names[i]!r} to be {want}, got shares that sum to {placed[i]:g}."
        raise ValidationError(rule)
