"""GPU memory that vLLM uses besides the KV cache: weights, activations, and memory outside of PyTorch.

vLLM measures these when it starts (vllm/v1/worker/gpu_worker.py, `determine_available_memory`). The KV cache gets
gpu_memory_utilization times the memory, less the loaded weights, less the peak of a run at the largest batch, less the
memory of CUDA and NCCL. CUDA graphs are outside of this budget. The constants were derived from eight servers
(tests/fit/test_memory.py), seven of them with H100 and the defaults of vLLM 0.11 and later.
"""

from __future__ import annotations

from dataclasses import replace

from packer.engine_spec import EngineSpec
from packer.errors import IncompatibleError
from packer.fit.dimensions import BYTES, KINDS, ModelDimensions
from packer.twin.datasheets import Datasheet
from packer.twin.override import BYTES_PER_LOGIT, SAMPLER_BYTES_PER_LOGIT, SAMPLER_RELEASE

GIB = 2.0**30
BYTES_PER_ACTIVATION = 2.5  # Bytes per element of the largest batch's hidden states, besides the sampler's bytes.

OUTSIDE_BYTES = 0.13 * GIB  # Bytes of CUDA and its libraries on a data-centre GPU.
OUTSIDE_CONSUMER_BYTES = 0.03 * GIB  # CUDA and its libraries on a GPU up to 40 GiB without links; an RTX 4090.
LINK_BYTES = {1: 0.0, 2: 0.41 * GIB, 4: 0.46 * GIB}
"""Buffers of NCCL and of the custom all-reduce, by GPUs of a server: 342 and 392 MB, and 0.07 GiB."""

EXTRA_VOCABULARY = 256  # Tokens that an adapter may add, before `NO_EXTRA_VOCABULARY` (vLLM's `lora_extra_vocab_size`).
NO_EXTRA_VOCABULARY = (0, 12)
EXPERT_SLOTS = (0, 11)  # From here slots also hold all experts of a mixture (vllm/lora/layers/fused_moe.py of 0.11.1).

RUNTIME_BYTES = 0.53e9
"""CUDA context, communication buffers and allocator slack in vLLM 0.8.5: the memory that weights, activations and
logits do not explain in the KV budgets of both calibrated profiles (0.57 and 0.49 GB)."""


def kv_budget(model: ModelDimensions, sheet: Datasheet, engine: EngineSpec) -> float:
    """Return the bytes on all GPUs of a server that are left for KV cache and slots. Weights are split over the GPUs of
    a data-parallel rank, experts over all GPUs; all else is on each. Raises `IncompatibleError`: nothing is left."""
    n, budget = engine.tensor_parallel_size, _budget_bytes(model, sheet, engine)
    if budget <= 0:
        larger = [k for k in (2, 4, 8, 16) if k > n and model.splits_over(k)]
        split = {k: replace(engine, tensor_parallel_size=k) for k in larger}
        more = next((k for k in larger if _budget_bytes(model, sheet, split[k]) > 0.0), None)
        raise IncompatibleError(
            f"{model.name} needs {model.weights_bytes / 1e9:.1f} GB for its weights: "
            f"{f'{engine.gpus} x ' if engine.gpus > 1 else ''}{sheet.title} leaves no memory for a KV cache."
            + (f" What does: --tensor-parallel-size {more}." if more else "")
        )
    return budget


def slot_bytes(model: ModelDimensions, engine: EngineSpec) -> tuple[float, float]:
    """Return the bytes of a slot on all GPUs of a server: without its rank, and per unit of `max_lora_rank`. Each
    data-parallel rank has all slots. SGLang, and vLLM with `lora_target_modules`, hold linear layers only."""
    n, fixed, per_rank = engine.tensor_parallel_size, 0.0, model.lora_bytes_on(engine.tensor_parallel_size)
    if engine.name == "vllm" and not engine.lora_target_modules:
        since = KINDS["embedding_lora"].get(model.kind)
        if since and engine.release >= tuple(since):  # on each GPU
            extra = EXTRA_VOCABULARY if engine.release < NO_EXTRA_VOCABULARY else 0
            fixed += 2.0 * BYTES * extra * model.hidden
            per_rank += 2.0 * BYTES * (model.vocabulary + extra + model.hidden)
        if engine.release >= EXPERT_SLOTS:
            each = 3.0 * (model.hidden + model.intermediate / n)
            per_rank += BYTES * model.expert_layers * model.experts * each
    return engine.gpus * fixed, engine.gpus * per_rank


def _budget_bytes(model: ModelDimensions, sheet: Datasheet, engine: EngineSpec) -> float:
    """Return the bytes left on all GPUs; may be < 0. SGLang keeps activations outside of `--mem-fraction-static`, and
    allocates the slots before the KV cache (model_runner.py, mem_pool.py)."""
    n, ranks = engine.gpus, engine.data_parallel_size
    weights = model.weights_bytes + (ranks - 1) * (model.weights_bytes - model.experts_bytes)
    share = sheet.memory_bytes * engine.gpu_memory_utilization
    if engine.name == "sglang":
        return n * (share - RUNTIME_BYTES) - weights
    seqs, tokens = engine.max_num_seqs, engine.max_num_batched_tokens
    if engine.release < SAMPLER_RELEASE:
        inner = model.intermediate * max(1, model.experts_per_token)
        peak: float = BYTES * tokens * 3 * inner + BYTES_PER_LOGIT * seqs * model.vocabulary
        return n * (share - peak - RUNTIME_BYTES) - weights
    rotary = BYTES * model.max_model_len * (model.rope_dim or model.head_dim)
    sampler = SAMPLER_BYTES_PER_LOGIT * seqs * model.vocabulary + BYTES_PER_ACTIVATION * tokens * model.hidden
    # inputs and outputs of an MLP and of each token's experts, at the largest batch of all ranks
    wide = max(model.intermediate * max(1, model.experts_per_token), model.dense_intermediate)
    peak = max(sampler, BYTES * (tokens * ranks) * (3.0 * wide / n + 2.0 * model.hidden))
    linked = sheet.link_bytes_s > 1e11
    outside = OUTSIDE_BYTES if linked or sheet.memory_bytes > 40 * GIB else OUTSIDE_CONSUMER_BYTES
    outside += LINK_BYTES[1 if n == 1 else 2 if n == 2 else 4]
    return n * (share - peak - outside - min(rotary, 0.1 * GIB)) - weights
