"""Variables of the repacking model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ortools.sat.python import cp_model

from packer.solvers.classes import IntArray
from packer.solvers.cpsat.surrogate import Option


@dataclass(frozen=True)
class Variables:
    """For each bin b: `counts[b][k]` adapters of class k, `option[b][o]` true for its slots, `weight[b]`."""

    counts: list[list[cp_model.IntVar]]
    option: list[list[cp_model.IntVar]]
    weight: list[cp_model.IntVar]
    heaviest: cp_model.IntVar

    @classmethod
    def create(
        cls, model: cp_model.CpModel, demand: IntArray, options: Sequence[Option], bins: int, most: int
    ) -> Variables:
        """Variables of `bins` bins that hold `demand` (K,) together; no weight exceeds `most`."""
        counts = [
            [model.new_int_var(0, int(d), f"n{b}_{k}") for k, d in enumerate(demand.tolist())]
            for b in range(bins)
        ]
        option = [[model.new_bool_var(f"o{b}_{o}") for o in range(len(options))] for b in range(bins)]
        weight = [model.new_int_var(0, most, f"w{b}") for b in range(bins)]
        return cls(counts, option, weight, model.new_int_var(0, most, "heaviest"))
