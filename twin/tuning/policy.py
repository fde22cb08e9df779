"""Policies by which training shares a server, by name, and the kernel's record of a job with one of them."""

from __future__ import annotations

import math
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np

from packer.arrays import Record
from packer import checks, registry
from packer.errors import IncompatibleError
from packer.job import FineTuning
from packer.profile import Profile
from packer.twin.law.law import coefficient_vector
from packer.twin.law.linear import linear_features
from packer.twin.tuning.state import CHUNKED, TRAINING, Tuning
from packer.twin.tuning.step import next_batch

NONE = "none"  # The policy of a server that does not train.
LENGTHS = 4096  # Number of sample lengths that are drawn; they are then used again in the same order.
ACTIVATIONS = 14.0  # Activations kept for the backward pass, in hidden states per layer and token.
OPTIMISER_BYTES = 16.0  # Bytes per trained parameter: weight, gradient and Adam's two moments in fp32.


@runtime_checkable
class TuningPolicy(Protocol):
    """How training shares a server; the fields of its dataclass are its parameters.

    `rule`: the branch of `packer.twin.tuning.step` that executes it. `searched`: the parameter that trades
    training for latency, and its values. `own_base_model`: training has its own copy of the weights.
    """

    name: ClassVar[str]
    rule: ClassVar[int]
    searched: ClassVar[tuple[str, tuple[float, ...]]]
    own_base_model: ClassVar[bool]

    def parameters(self) -> dict[str, float]:
        """Return the fields of `packer.twin.tuning.state.TRAINING` that the kernel reads, with their values."""


def load_policy(spec: str) -> TuningPolicy:
    """The policy of a text such as "chunked:chunk_tokens=64"; raises `UnknownNameError`, `ValidationError`."""
    policy: TuningPolicy = registry.make("tuning policy", spec)
    return policy


def trains(job: FineTuning | None) -> bool:
    """Whether there is anything to train."""
    return job is not None and job.policy != NONE and job.samples != 0


def _prefill_ms(profile: Profile, tokens: float) -> float:
    law = profile.latency
    state = linear_features(
        prefill_tokens=tokens, graph_max_tokens=max(law.graph_max_tokens, int(tokens) - 1),
        ridge_tokens=law.ridge_tokens, expert_share=law.expert_share,
    )  # fmt: skip
    return float(state[0] @ coefficient_vector(law))


def new_tuning(job: FineTuning, profile: Profile, seed: int) -> Tuning:
    """The job at its start; raises `IncompatibleError`: no cost of a prefill token; `ValidationError`: the policy."""
    policy = load_policy(job.policy)
    if profile.latency.form != "linear":
        rule = f"Training beside inference needs a profile whose step law is linear, and {profile.name} has the"
        raise IncompatibleError(f"{rule} paper's, which does not say what the tokens of a prefill cost.")
    checks.choice(f"rule of the tuning policy {policy.name!r}", policy.rule, range(CHUNKED + 1))
    own = {
        key: checks.real(f"{key} of the tuning policy {policy.name!r}", value, low=0.0)
        for key, value in policy.parameters().items()
    }
    # An estimate's step law is not linear: up to the tokens of a batch arithmetic and experts may come to bound it.
    linear = not (profile.latency.ridge_tokens or profile.latency.expert_share)
    many = 513.0 if linear else max(513.0, job.batch * job.sample_tokens.expected)
    one_ms = _prefill_ms(profile, 1.0)
    token_ms = (_prefill_ms(profile, many) - one_ms) / (many - 1.0)  # the rest of a forward pass takes a fixed time
    training = np.zeros(1, dtype=TRAINING)[0]
    given = {
        "rule": policy.rule,
        "layers": job.layers,
        "weights_ms": max(one_ms - token_ms, 0.0) if job.weights_ms is None else job.weights_ms,
        "token_ms": token_ms,
        "backward_ratio": job.backward_ratio,
        "batch": job.batch,
        "samples": math.inf if job.samples is None else job.samples,
        **own,
    }
    for field, value in given.items():
        training[field] = value
    lengths = job.sample_tokens.sample(np.random.default_rng((seed, 0x74756E65)), LENGTHS)
    next_batch(training, lengths)
    return Tuning(training, lengths)


def reserved_bytes(job: FineTuning, profile: Profile) -> float:
    """Return the GPU memory that training takes from the KV cache, bytes.

    It holds the trained adapter with its optimiser, and the activations of a batch: `ACTIVATIONS` x layers x tokens x
    hidden size x 2 bytes. The hidden size h follows from 12 h² parameters of 2 bytes per layer. A policy whose training
    runs in a process of its own takes the weights as well.
    """
    # Weights have 2 bytes per parameter.
    adapter = profile.model.lora_bytes_per_rank * job.rank / 2.0 * OPTIMISER_BYTES
    hidden = math.sqrt(profile.model.weights_bytes / (24.0 * job.layers))
    tokens = job.batch * job.sample_tokens.expected
    activations = ACTIVATIONS * job.layers * tokens * hidden * 2.0
    own = profile.model.weights_bytes if load_policy(job.policy).own_base_model else 0.0
    return adapter + activations + own


def kv_tokens_of(job: FineTuning | None, profile: Profile) -> int:
    """`reserved_bytes` in tokens of the KV cache; 0 if nothing is trained."""
    if job is None or not trains(job):
        return 0
    return math.ceil(reserved_bytes(job, profile) / profile.model.kv_bytes_per_token)


class Trained:
    """What training achieved in a run; `training`: the kernel's record at the end."""

    def __init__(self, policy: str, training: Record, duration_s: float, steps: int) -> None:
        self.policy = policy
        self.samples = int(training["done"])  # Samples whose backward pass was complete.
        self.samples_s = self.samples / duration_s  # Samples per second.
        self.tok_s = float(training["tokens_done"]) / duration_s  # Tokens of these samples per second.
        self.beside_share = float(training["beside"]) / steps if steps else 0.0
        """Share of the engine's steps during which training ran."""

    def to_dict(self) -> dict[str, float | str | int]:
        """For JSON."""
        return dict(vars(self))
