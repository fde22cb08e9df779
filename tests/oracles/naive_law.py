"""The step law of the twin's slow oracle, term by term."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from naive_twin import NaiveTwin


def step_ms(twin: NaiveTwin, b: int, p: int, context: int) -> float:
    """The step law as the table in `packer.terms` says in words."""
    server, active = twin.server, twin._active()
    a = len(active)
    c = defaultdict(float, server.coefficients)
    if server.form == "paper":
        r_p = len(twin.waiting)
        return (
            c["k1"] * b
            + c["k2"] * r_p
            + c["k3"] * r_p * a / max(len(twin.adapters), 1)
            + (c["k4"] * b + c["k5"]) * (c["k6"] * a + c["k7"])
        )
    t = b + p
    request_ranks = [server.ranks[request.adapter] for request in twin.running]
    prefill, beyond = float(p > 0), float(t > server.graph_max)
    captured = bool(twin.adapters) and t <= server.graph_max and not server.graphs_without_lora
    some = float(a > 0 or captured)
    lora_ms = (
        c["first_adapter_ms"]
        + c["per_slot_ms"] * server.slots
        + c["per_slot_rank_ms"] * server.slot_rank
        + c["per_lora_token_ms"] * t
        + c["per_slot_token_ms"] * server.slots * t
        + c["per_slot_rank_token_ms"] * server.slot_rank * t
    )
    padded = t if t > server.graph_max else -(-t // 8) * 8  # CUDA graphs are captured in steps of 8
    split_k = 64 if (padded if t <= 512 else t) < 128 else 8
    rank_blocks = math.ceil(server.slot_rank / 16)
    lora_ms += c["per_slot_block_ms"] * server.slots * split_k * math.ceil(t / 32) * rank_blocks
    return (
        c["base_ms"]
        + c["per_decode_ms"] * b
        + c["per_prefill_token_ms"] * p
        + c["prefill_step_ms"] * prefill
        + some * lora_ms
        + c["per_adapter_ms"] * a
        + c["per_rank_ms"] * sum(server.ranks[adapter] for adapter in active)
        + c["per_adapter_token_ms"] * a * t
        + c["per_adapter_block_ms"] * a * split_k * rank_blocks
        + c["per_request_rank_ms"] * sum(request_ranks)
        + c["per_padded_rank_ms"] * len(request_ranks) * max(request_ranks, default=0)
        + c["per_adapter_registered_ms"] * a * len(twin.lora.registered)
        + c["per_kv_token_ms"] * context
        + beyond * (c["beyond_graph_step_ms"] + c["per_token_beyond_graph_ms"] * (t - server.graph_max))
        + c["per_waiting_ms"] * len(twin.waiting)
        + (c["per_token_beyond_ridge_ms"] * max(0.0, t - server.ridge) if server.ridge else 0.0)
        + (c["per_attended_token_ms"] * twin.attended if p else 0.0)
        + c["experts_ms"] * (1.0 - (1.0 - server.expert_share) ** t)
    )


GRAIN = 1024
"""Coefficients are multiples of 1/1024 ms: sums are exact in any order."""


def drawn_law(rng: np.random.Generator, *further: str) -> dict[str, float]:
    """Coefficients of a linear law whose terms all matter for small requests; `further`: terms besides the usual."""
    most = {"per_decode_ms": 60, "per_prefill_token_ms": 60, "per_adapter_ms": 200, "per_kv_token_ms": 10}
    most |= {**dict.fromkeys(further, 10), "per_request_rank_ms": 8, "per_padded_rank_ms": 8}
    base_ms = int(rng.integers(1, 20)) / 2
    return {"base_ms": base_ms, **{name: int(rng.integers(0, high)) / GRAIN for name, high in most.items()}}
