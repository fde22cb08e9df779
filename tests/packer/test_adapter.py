"""Adapters."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from packer.adapter import IDLE_RATE, Adapter
from packer.errors import ValidationError
from packer.traces.assign import generate_workload


@pytest.mark.parametrize("name", ["", "x" * 257, 7, None, "\ud800", "a\0", "a\nb", "\x1b[2J", "a\x7f", "\x85"])
def test_names(name: object) -> None:
    """A name is text of 1 to 256 characters that a file and a command line can hold."""
    with pytest.raises(ValidationError, match="name"):
        Adapter(name, 8, 0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", [-1, -8, 7.5, 8.0, 513, 10**9, True, "8"])
def test_ranks(rank: object) -> None:
    """A rank is a whole number from 0, the base model, to 512; the message names the adapter."""
    with pytest.raises(ValidationError, match="rank of adapter 'a'"):
        Adapter("a", rank, 0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [-1, 1.5, True, "8", 10**12])
def test_shared_prefixes(tokens: object) -> None:
    """A shared prefix is a whole number of tokens from 0; the message names the adapter."""
    with pytest.raises(ValidationError, match="shared_prefix_tokens of adapter 'a'"):
        Adapter("a", 8, 0.1, shared_prefix_tokens=tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize("rate", [-0.1, math.nan, math.inf, 1e-320, 1e-13, 1e7, "0.1", None])
def test_rates(rate: object) -> None:
    """A rate is 0 or a finite number from 1e-12 to 1e6 req/s: times between requests must not overflow."""
    with pytest.raises(ValidationError, match="rate of adapter 'a'"):
        Adapter("a", 8, rate)  # type: ignore[arg-type]


@pytest.mark.parametrize("rate", [0, 0.0, -0.0])
def test_a_rate_of_0_is_idle(rate: float) -> None:
    """An adapter without requests is part of a fleet, in Python as in files and generated fleets, at any factor,
    and adds next to nothing to the load of the others."""
    assert Adapter("a", 8, rate).rate == IDLE_RATE
    fleet = generate_workload(4, ranks=[8], rates=[0.0, 1.0])
    assert sorted(fleet.rates) == [IDLE_RATE, IDLE_RATE, 1.0, 1.0]
    assert fleet.rate == pytest.approx(fleet.given_rates.sum(), rel=1e-8)
    assert sorted(fleet.scaled(1.5).given_rates) == [0.0, 0.0, 1.5, 1.5]


def test_numpy_values_become_plain_and_frozen() -> None:
    """Values from arrays are stored as Python numbers, and nothing can be changed afterwards."""
    adapter = Adapter(np.array(["a"])[0], np.int64(8), np.float64(0.5))  # type: ignore[arg-type]
    assert (type(adapter.name), type(adapter.rank), type(adapter.rate)) == (str, int, float)
    with pytest.raises(dataclasses.FrozenInstanceError):
        adapter.rate = 1.0  # type: ignore[misc]
