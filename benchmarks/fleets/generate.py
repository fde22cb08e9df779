"""Fleets of several base models, and the kinds of server to choose from: seeded."""

from __future__ import annotations

from functools import cache

import numpy as np

import packer
from packer.fit.dimensions import ModelDimensions
from packer.fit.estimate import estimate_profile
from packer.profile import Profile

MODELS = {
    "llama-3.1-8b-instruct": ModelDimensions(
        "llama-3.1-8b-instruct", "llama", 32, 4096, 14336, 32, 8, 128, 128256, False, 131072
    ),
    "qwen-2.5-7b-instruct": ModelDimensions(
        "qwen-2.5-7b-instruct", "qwen2", 28, 3584, 18944, 28, 4, 128, 152064, False, 32768
    ),
    "mistral-7b-instruct-v0.3": ModelDimensions(
        "mistral-7b-instruct-v0.3", "mistral", 32, 4096, 14336, 32, 8, 128, 32768, False, 32768
    ),
}
GPUS = ("h100-80gb", "a100-80gb", "l40s")


@cache
def kinds(models: tuple[str, ...] = tuple(MODELS), gpus: tuple[str, ...] = GPUS) -> tuple[Profile, ...]:
    """Estimated profiles of these models on these GPUs, with the prices of the data sheets."""
    return tuple(estimate_profile(MODELS[model], gpu, max_model_len=8192) for model in models for gpu in gpus)


def fleet(n: int, seed: int, models: tuple[str, ...] = tuple(MODELS)) -> packer.Workload:
    """`n` adapters: models in uneven parts, ranks 8 to 64, rates by a power law of random steepness and load."""
    rng = np.random.default_rng([seed, n])
    weights = rng.dirichlet(np.full(len(models), 3.0))
    model = rng.choice(len(models), size=n, p=weights)
    model[: len(models)] = np.arange(len(models))[:n]
    popularity = np.arange(1, n + 1.0) ** -rng.uniform(0.3, 1.1)
    rng.shuffle(popularity)
    rates = popularity / popularity.mean() * rng.uniform(0.04, 0.25)
    rates = np.minimum(rates, 3.0)
    ranks = rng.choice([8, 16, 32, 64], size=n, p=rng.dirichlet([4, 4, 2, 1]))
    adapters = [
        packer.Adapter(f"a{i}", int(ranks[i]), float(f"{rates[i]:.4g}"), model=models[model[i]]) for i in range(n)
    ]
    return packer.Workload(
        adapters,
        packer.Lengths.gamma(float(rng.uniform(100, 900)), 1.1),
        packer.Lengths.gamma(float(rng.uniform(60, 300)), 1.0),
        name=f"fleet-{seed}",
    )
