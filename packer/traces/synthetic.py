"""Made-up workloads: sets of rates and ranks as in the paper, or a power law of popularity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from packer import checks
from packer.adapter import Adapter
from packer.errors import ValidationError
from packer.lengths import Lengths
from packer.sessions import Sessions
from packer.traces.assign import adapter_names, popularity
from packer.workload import SHAREGPT_CORRELATION, SHAREGPT_INPUT, SHAREGPT_OUTPUT, Workload

_T = TypeVar("_T", int, float)


class PowerLaw(NamedTuple):
    """A total rate, req/s; the k-th adapter gets a share proportional to k^−`exponent`."""

    total_rate: float
    exponent: float = 1.0


def generate_workload(
    n_adapters: int, *, ranks: Sequence[int], rates: Sequence[float] | PowerLaw,
    input_tokens: Lengths = SHAREGPT_INPUT, output_tokens: Lengths = SHAREGPT_OUTPUT,
    shared_prefix_tokens: int = 0, sessions: Sessions | None = None, seed: int = 0,
) -> Workload:  # fmt: skip
    """A workload of `n_adapters`.

    `rates`: a set of which each value comes equally often (as in arXiv 2602.24044), or a power law. Each of `ranks`
    comes equally often. Which adapter gets which is drawn from `seed`. The prompts of
    each adapter share `shared_prefix_tokens`; all have these `sessions`.
    """
    checks.integer("the number of adapters", n_adapters, low=1, high=1_000_000)
    rng = np.random.default_rng(checks.integer("seed", seed, low=0))
    if isinstance(rates, PowerLaw):
        checks.real("the total rate", rates.total_rate, low=0.0, open_low=True)
        of_adapter = (popularity(n_adapters, rates.exponent) * rates.total_rate).tolist()
    else:
        of_adapter = _evenly(rates, n_adapters, rng)
    rows = zip(adapter_names(n_adapters), _evenly(ranks, n_adapters, rng), of_adapter, strict=True)
    adapters = [
        Adapter(adapter, rank, rate, shared_prefix_tokens=shared_prefix_tokens)
        for adapter, rank, rate in rows
    ]
    return Workload(
        adapters, input_tokens, output_tokens, SHAREGPT_CORRELATION, name="generated", sessions=sessions
    )


def _evenly(values: Sequence[_T], n: int, rng: np.random.Generator) -> list[_T]:
    """n values in random order, each of the set as often as the others (give or take one)."""
    if not values:
        raise ValidationError("Expected at least one value to choose from, got none.")
    return [values[k % len(values)] for k in rng.permutation(n).tolist()]
