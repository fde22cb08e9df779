"""Constraints of the repacking model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from ortools.sat.python import cp_model

from packer.checks import slot_rank_for
from packer.solvers.candidates import MAX_ADAPTERS_PER_GPU
from packer.solvers.classes import IntArray
from packer.solvers.cpsat.surrogate import Option
from packer.solvers.cpsat.variables import Variables


def cover(model: cp_model.CpModel, variables: Variables, demand: IntArray) -> None:
    """Every adapter has exactly one bin; no bin holds more than a GPU may."""
    for k, needed in enumerate(demand.tolist()):
        model.add(sum(counts[k] for counts in variables.counts) == needed)
    for counts in variables.counts:
        model.add(sum(counts) <= MAX_ADAPTERS_PER_GPU)
        model.add(sum(counts) >= 1)


def slots(model: cp_model.CpModel, variables: Variables, options: Sequence[Option], ranks: IntArray) -> None:
    """Each bin has one kind of slots; they hold its ranks, are no more than its adapters, and set its
    weight."""
    for counts, chosen, weight in zip(variables.counts, variables.option, variables.weight, strict=True):
        model.add_exactly_one(chosen)
        for literal, option in zip(chosen, options, strict=True):
            for k, rank in enumerate(ranks.tolist()):
                if slot_rank_for(rank) > option.slot_rank:
                    model.add(counts[k] == 0).only_enforce_if(literal)
            model.add(sum(counts) >= option.max_loras).only_enforce_if(literal)
            terms = cp_model.LinearExpr.weighted_sum(counts, option.weights.tolist())
            model.add(weight >= terms + option.base).only_enforce_if(literal)
        model.add(variables.heaviest >= weight)


def order(model: cp_model.CpModel, variables: Variables) -> None:
    """Bins are interchangeable: the one with more adapters comes first."""
    for left, right in zip(variables.counts, variables.counts[1:], strict=False):
        model.add(sum(left) >= sum(right))


def no_good(
    model: cp_model.CpModel,
    variables: Variables,
    rejected: IntArray,
    dominates: npt.NDArray[np.bool_],
    label: str,
) -> None:
    """No bin is at least as heavy as one that is known to be infeasible with every `max_loras`.

    A bin is as heavy if each rejected adapter has a partner of its own in it that is no lighter
    (`dominates`[i, j]: class i is no lighter than class j). Where the rejected classes form a chain, that is:
    for each of them, as many adapters at least that heavy; otherwise only equal classes are partners.
    """
    held = np.flatnonzero(rejected).tolist()
    chain = all(dominates[i, j] or dominates[j, i] for i in held for j in held)
    for b, counts in enumerate(variables.counts):
        less = []
        for k in held:
            partners = np.flatnonzero(dominates[:, k]).tolist() if chain else [k]
            needed = sum(int(rejected[j]) for j in partners)
            literal = model.new_bool_var(f"{label}_{b}_{k}")
            model.add(sum(counts[j] for j in partners) <= needed - 1).only_enforce_if(literal)
            less.append(literal)
        model.add_bool_or(less)
