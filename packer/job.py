"""A fine-tuning job that shares a server with inference."""

from __future__ import annotations

from dataclasses import dataclass, field

from packer import checks
from packer.lengths import Lengths
from packer.public import checked


@dataclass(frozen=True)
class FineTuning:
    """A LoRA adapter that a server, or each server of a plan or cluster, trains alongside its requests.

    `samples`: number of samples that each server trains on; None: unlimited.
    `sample_tokens`: length of a sample, tokens.
    `rank`: rank of the adapter that is trained.
    `batch`: samples of one training step (a forward and a backward pass).
    `backward_ratio`: time of a backward pass / time of a forward pass: 1 with frozen weights, 2 if activations are
    recomputed.
    `layers`: number of transformer layers of the base model; a pass is divided into one tasklet per layer.
    `weights_ms`: fixed time of a pass, mostly for reading the weights, ms; None: the fixed part of the profile's step
    law, which also includes the engine's work on the host.
    `policy`: how training shares the server, with parameters as in "llmstation:slo_decode_ms=45"; "none": no training.
    """

    samples: int | None = None
    sample_tokens: Lengths = field(default_factory=lambda: Lengths.constant(512.0))
    rank: int = 16
    batch: int = 1
    backward_ratio: float = 1.0
    layers: int = 32
    weights_ms: float | None = None
    policy: str = "llmstation"

    @checked
    def __post_init__(self) -> None:
        checks.instance("sample_tokens", self.sample_tokens, Lengths, "packer.Lengths.constant(512)")
        if self.samples is not None:
            checks.keep_integer(self, "samples", low=0, high=10**12)
        checks.keep_integer(self, "rank", low=1, high=checks.SLOT_RANKS[-1])
        checks.keep_integer(self, "batch", low=1, high=100_000)
        checks.keep_integer(self, "layers", low=1, high=10_000)
        checks.keep_real(self, "backward_ratio", low=0.0, high=100.0, open_low=True)
        if self.weights_ms is not None:
            checks.keep_real(self, "weights_ms", low=0.0, high=1e6)
        checks.name("policy", self.policy)
