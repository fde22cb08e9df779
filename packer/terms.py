"""The terms of the two step laws: the table that defines names, order, regressions and estimates.

`packer.twin.law.linear.state_vector` computes the quantity that each linear coefficient multiplies. A new term is a
row in `terms.toml` and a line in `state_vector`.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

Part = Literal["model", "lora", "queue"]
Bound = Literal["host", "compute", "kv", "adapters", "launches"]


@dataclass(frozen=True, slots=True)
class Term:
    """A term of a step law: the coefficient `name`, in `unit`, is multiplied by the quantity `times`.

    Symbols in `times`: B decodes; P prefill tokens; T = B + P; A distinct adapters in the batch; R the sum of their
    ranks; N requests in the batch; Q the sum of the requests' ranks; L the largest rank among them; S slots; M the rank
    of a slot; H adapters in host memory (in each step, vLLM copies their registry once per adapter of the batch:
    `LRUCacheWorkerLoRAManager.add_adapter` calls `list_adapters`); K context tokens of the decodes; V waiting
    requests; G the largest batch with a CUDA graph; D the SPLIT_K of vLLM's shrink kernel (64 below 128 tokens, with
    the padding of CUDA graphs, else 8; vllm/lora/ops/triton_ops/utils.py); I the number of tokens above which
    arithmetic takes longer than reading the weights; J the number of tokens that each prefill token attends to, summed
    over prefill tokens; X the share of a layer's experts that process a token. [x] is 1 if x holds, else 0.
    `part`: the part of the engine that causes the term; only "model" remains without adapters and queue.
    `bound`: the resource that the term's time scales with on other hardware: "adapters" is the bytes of adapters,
    "launches" the grid of their kernels.
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
"""Terms of the linear law, in order: the time of a step is Σ coefficient × quantity. Terms of the paper's law
(`packer.twin.law.paper`)."""

LINEAR_TERMS = tuple(term.name for term in LINEAR)
PAPER_TERMS = tuple(term.name for term in PAPER)
