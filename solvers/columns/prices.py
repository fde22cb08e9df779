"""Prices in few dimensions: features of an adapter that take room on a GPU, the same for all classes."""

from __future__ import annotations

import numpy as np

from packer.arrays import FloatArray
from packer.solvers.candidates import slot_ranks
from packer.solvers.classes import Classes


def features(classes: Classes) -> FloatArray:
    """Features of an adapter of each class, float64 (K, D), all >= 0.

    Input tok/s, output tok/s, and 1; then 1 and the load for each slot rank above the smallest that the adapter
    reaches: large slots leave less KV cache, and steps of large ranks take longer.
    """
    slots = slot_ranks(classes.ranks)
    columns = [classes.rates * classes.tokens_in, classes.rates * classes.tokens_out, np.ones(len(classes))]
    for rank in np.unique(slots)[1:].tolist():
        reaches = (slots >= rank).astype(np.float64)
        columns += [reaches, reaches * classes.loads]
    return np.stack(columns, axis=1)
