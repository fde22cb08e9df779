"""The terms of the two step laws: the one table from which names, order, regressions and estimates derive.

`packer.twin.law.linear.state_vector` computes what each linear term multiplies: a new term is a row of `terms.toml`
and a line there.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.resources import files
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
    shrink kernel (64 below 128 tokens, padded as CUDA graphs are, else 8; vllm/lora/ops/triton_ops/utils.py), I the
    tokens from which arithmetic takes longer than reading the weights, J the sum over the prefill tokens of the
    tokens that each attends to, X the share of the experts that a token is sent to; [x] is 1 if x holds, else 0.
    `part`: what it belongs to; without adapters and queue only "model" is left. `bound`: what its time scales with on
    other hardware.
    """

    name: str
    unit: str
    times: str
    part: Part
    bound: Bound


LINEAR, PAPER = (
    tuple(Term(name, **row) for name, row in rows.items())
    for rows in tomllib.loads(files("packer").joinpath("terms.toml").read_text("utf-8")).values()
)
"""The linear law: a step takes the sum of coefficient × what it multiplies, in this order; and the paper's law,
`packer.twin.law.paper`."""

LINEAR_TERMS = tuple(term.name for term in LINEAR)
PAPER_TERMS = tuple(term.name for term in PAPER)
