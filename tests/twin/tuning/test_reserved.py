"""Training takes the memory of its adapter, its activations and, in a process of its own, of the weights."""

from __future__ import annotations

from dataclasses import replace

import pytest

from packer.job import FineTuning
from packer.lengths import Lengths
from packer.profile import Profile
from packer.twin.tuning.policy import reserved_bytes


@pytest.mark.parametrize(("policy", "weights"), [("llmstation", 0.0), ("spatial", 16e9)])
def test_by_hand(toy_profile: Profile, policy: str, weights: float) -> None:
    """Rank 8 of 2.6 MB a rank with 16 bytes for 2; 2 × 100 tokens of 14 vectors of 2 bytes in 24 layers."""
    job = FineTuning(sample_tokens=Lengths.constant(100.0), rank=8, batch=2, layers=24, policy=policy)
    hidden = (16e9 / 24 / 12 / 2) ** 0.5  # 12 h² parameters of 2 bytes in each layer
    adapter, activations = 8 * 2.6e6 * 8, 14 * 24 * 200 * hidden * 2
    assert reserved_bytes(job, toy_profile) == pytest.approx(adapter + activations + weights)


@pytest.mark.parametrize("name", ["batch", "rank"])
def test_it_grows_with_what_is_trained(toy_profile: Profile, name: str) -> None:
    """Twice the batch is twice the activations, twice the rank twice the adapter: together, twice all."""
    job = FineTuning(layers=24)
    one = reserved_bytes(job, toy_profile)
    assert one < reserved_bytes(replace(job, **{name: 2 * getattr(job, name)}), toy_profile) < 2 * one
    assert reserved_bytes(replace(job, batch=2 * job.batch, rank=2 * job.rank), toy_profile) == pytest.approx(2 * one)
