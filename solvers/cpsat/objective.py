"""Objective of the repacking model."""

from __future__ import annotations

from ortools.sat.python import cp_model

from packer.solvers.cpsat.variables import Variables


def lightest(model: cp_model.CpModel, variables: Variables) -> None:
    """Minimise the heaviest bin, then the sum of the weights.

    For a limit that is the repacking most likely to pass the predictor; for a cost, the lowest worst latency.
    """
    bins = len(variables.weight)
    model.minimize(2 * bins * variables.heaviest + sum(variables.weight))
