"""The terms of the two step laws: the one table from which names, order, regressions and estimates derive.

`packer.twin.law.linear.state_vector` computes what each linear term multiplies: a new term is a row here and a
line there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Part = Literal["model", "lora", "queue"]
Bound = Literal["host", "compute", "kv", "adapters"]


@dataclass(frozen=True, slots=True)
class Term:
    """A term of a step law: coefficient `name`, in `unit`, times `times`.

    Symbols: B decodes, P prefill tokens, T = B + P, A distinct adapters in the batch, R the sum of their ranks, N
    requests in the batch, Q the sum of their ranks, L the largest rank among them, S slots, M their rank, H
    adapters in host memory (vLLM copies their registry for each adapter of the batch in each step:
    `LRUCacheWorkerLoRAManager.add_adapter` calls `list_adapters`), K context tokens of the decodes, V waiting
    requests, G the largest batch with a CUDA graph, D the SPLIT_K of vLLM's
    shrink kernel (64 below 128 tokens, padded as CUDA graphs are, else 8; vllm/lora/ops/triton_ops/utils.py); [x]
    is 1 if x holds, else 0. `part`: what it belongs to; without adapters and queue only "model" is left. `bound`:
    what its time scales with on other hardware.
    """

    name: str
    unit: str
    times: str
    part: Part
    bound: Bound


LINEAR = (
    Term("base_ms", "ms", "1", "model", "host"),
    Term("per_decode_ms", "ms/request", "B", "model", "compute"),
    Term("per_prefill_token_ms", "ms/token", "P", "model", "compute"),
    Term("prefill_step_ms", "ms", "[P > 0]", "model", "host"),
    Term("first_adapter_ms", "ms", "[A > 0]", "lora", "adapters"),
    Term("per_adapter_ms", "ms/adapter", "A", "lora", "adapters"),
    Term("per_rank_ms", "ms/rank", "R", "lora", "adapters"),
    Term("per_slot_ms", "ms/slot", "[A > 0] S", "lora", "adapters"),
    Term("per_slot_rank_ms", "ms/rank", "[A > 0] M", "lora", "adapters"),
    Term("per_lora_token_ms", "ms/token", "[A > 0] T", "lora", "adapters"),
    Term("per_adapter_token_ms", "ms/(adapter token)", "A T", "lora", "adapters"),
    Term("per_slot_token_ms", "ms/(slot token)", "[A > 0] S T", "lora", "adapters"),
    Term("per_kv_token_ms", "ms/token", "K", "model", "kv"),
    Term("beyond_graph_step_ms", "ms", "[T > G]", "model", "host"),
    Term("per_token_beyond_graph_ms", "ms/token", "[T > G] (T - G)", "model", "compute"),
    Term("per_slot_rank_token_ms", "ms/(rank token)", "[A > 0] M T", "lora", "adapters"),
    Term("per_waiting_ms", "ms/request", "V", "queue", "host"),
    Term("per_slot_block_ms", "ms/(slot block)", "[A > 0] S D ceil(T / 32) ceil(M / 16)", "lora", "adapters"),
    Term("per_adapter_block_ms", "ms/(adapter block)", "A D ceil(M / 16)", "lora", "adapters"),
    Term("per_request_rank_ms", "ms/rank", "Q", "lora", "adapters"),
    Term("per_padded_rank_ms", "ms/rank", "N L", "lora", "adapters"),
    Term("per_adapter_registered_ms", "ms/adapter^2", "A H", "lora", "host"),
)
"""Terms of the linear law: a step takes the sum of coefficient × what it multiplies, in this order."""

PAPER = (
    Term("k1", "ms/request", "B", "model", "host"),
    Term("k2", "ms/request", "V", "queue", "host"),
    Term("k3", "ms/request", "V A / all adapters", "queue", "host"),
    Term("k4", "1/request", "B, in the factor of k6 and k7", "model", "compute"),
    Term("k5", "1", "1, in the factor of k6 and k7", "model", "compute"),
    Term("k6", "ms/adapter", "A, in the factor of k4 and k5", "lora", "adapters"),
    Term("k7", "ms", "1, in the factor of k4 and k5", "model", "host"),
)
"""Terms of the paper's law, arXiv 2602.24044, equation (1); see `packer.twin.law.paper`."""

LINEAR_TERMS = tuple(term.name for term in LINEAR)
PAPER_TERMS = tuple(term.name for term in PAPER)
