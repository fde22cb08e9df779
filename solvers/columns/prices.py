"""Prices in few dimensions: what of an adapter takes room on a GPU, whichever class it is of."""

from __future__ import annotations

import numpy as np

from packer.arrays import FloatArray
from packer.solvers.candidates import slot_ranks
from packer.solvers.classes import Classes


def features(classes: Classes) -> FloatArray:
    """What an adapter of each class brings, float64 (K, D), all >= 0.

    Its input and output tok/s, 1 for itself, and its load and 1 again for each slot rank that it reaches beyond the
    smallest: large slots leave less KV cache, and steps of large ranks take longer.
    """
    slots = slot_ranks(classes.ranks)
    columns = [classes.rates * classes.tokens_in, classes.rates * classes.tokens_out, np.ones(len(classes))]
    for rank in np.unique(slots)[1:].tolist():
        reaches = (slots >= rank).astype(np.float64)
        columns += [reaches, reaches * classes.loads]
    return np.stack(columns, axis=1)
