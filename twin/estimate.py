"""A profile from data sheets: better than nothing, and marked as such wherever it is used.

Memory follows from the model's dimensions. The step law is that of a calibrated server, each term scaled by
what bounds it (a roofline): reading weights and KV cache by the memory's bandwidth, tokens by the arithmetic,
adapters by their bytes over the bandwidth; host work stays as it is.
"""

from __future__ import annotations

from dataclasses import replace

from packer import checks
from packer.errors import IncompatibleError, UnknownNameError
from packer.io.profiles import load_profile
from packer.profile import (
    EngineSpec,
    GpuSpec,
    LatencySpec,
    LoadingSpec,
    MemorySpec,
    ModelSpec,
    Profile,
)
from packer.terms import LINEAR, Bound
from packer.twin.datasheets import Datasheet, datasheet
from packer.twin.model_config import BYTES, ModelDimensions

REFERENCE = "h100-64gb/llama-3.1-8b-instruct"
"""The calibrated profile whose step law is scaled."""

RUNTIME_BYTES = 0.53e9
"""CUDA context, communication buffers and allocator slack: what the KV budgets of both calibrated profiles
leave unexplained by weights, activations and logits (0.57 and 0.49 GB)."""

ENGINES = {"vllm": "0.8.5", "sglang": "0.5"}
"""Engines whose memory and slots are modelled, with the version that they are modelled after."""

BYTES_PER_LOGIT = 18
"""Of vLLM's profiling run in the sampler: bf16, float32, sorted float32 and int64 indices."""


def estimate_profile(
    model: ModelDimensions,
    gpu: str,
    *,
    max_model_len: int | None = None,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 2048,
    gpu_memory_utilization: float = 0.9,
    price_per_hour: float | None = None,
    name: str | None = None,
    engine_name: str = "vllm",
) -> Profile:
    """An uncalibrated profile of one model on one GPU of `packer.twin.datasheets`.

    Raises
    ------
    UnknownNameError
        There is no data sheet of that GPU, or the engine is none of `ENGINES`.
    IncompatibleError
        The weights alone don't fit.
    """
    sheet = datasheet(gpu)
    if engine_name not in ENGINES:
        raise UnknownNameError("engine", engine_name, ENGINES)
    sglang = engine_name == "sglang"
    engine = EngineSpec(
        name=engine_name,
        version=ENGINES[engine_name],
        block_size=1 if sglang else 16,
        max_model_len=max_model_len or model.max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        gpu_memory_utilization=gpu_memory_utilization,
    )
    budget = kv_budget_bytes(model, sheet, engine)
    if budget <= 0:
        raise IncompatibleError(
            f"{model.name} needs {model.weights_bytes / 1e9:.1f} GB for its weights: {sheet.title} leaves no "
            "memory for a KV cache."
        )
    if price_per_hour is not None:
        checks.real("the price per hour", price_per_hour, low=0.0)
    reference = load_profile(REFERENCE)
    return Profile(
        name=name or f"{sheet.name}/{model.name}",
        model=ModelSpec(
            model.name,
            model.weights_bytes,
            model.kv_bytes_per_token,
            model.lora_bytes_per_rank,
            model.repository,
        ),
        gpu=GpuSpec(
            sheet.title,
            sheet.memory_bytes,
            sheet.price_per_hour if price_per_hour is None else price_per_hour,
        ),
        engine=engine,
        memory=MemorySpec(
            budget,
            0.0 if sglang else model.slot_bytes,
            model.lora_bytes_per_rank if sglang else model.slot_bytes_per_rank,
            engine.max_model_len,
        ),
        latency=_latency(model, sheet, reference),
        loading=replace(_loading(model, reference), spares_batch=sglang),
        calibrated=False,
        provenance={
            "method": f"estimated from the model's dimensions and the data sheet of {sheet.title}; step law "
            f"scaled from {reference.name}",
        },
    )


def kv_budget_bytes(model: ModelDimensions, sheet: Datasheet, engine: EngineSpec) -> float:
    """Bytes left for KV cache and adapter slots; may be < 0.

    vLLM takes its profiling run from `gpu_memory_utilization`; SGLang leaves activations outside of
    `--mem-fraction-static`, and allocates the slots before the KV cache (model_runner.py, mem_pool.py).
    """
    if engine.name == "sglang":
        return sheet.memory_bytes * engine.gpu_memory_utilization - model.weights_bytes - RUNTIME_BYTES
    activations = BYTES * engine.max_num_batched_tokens * 3 * model.intermediate
    logits = BYTES_PER_LOGIT * engine.max_num_seqs * model.vocabulary
    available = sheet.memory_bytes * engine.gpu_memory_utilization
    return available - model.weights_bytes - activations - logits - RUNTIME_BYTES


def _latency(model: ModelDimensions, sheet: Datasheet, reference: Profile) -> LatencySpec:
    scaled = scaled_law(model, sheet, reference)
    rounded = {term: float(f"{value:.6g}") for term, value in scaled.items() if value > 0}
    return LatencySpec("linear", rounded, reference.latency.graph_max_tokens)


def scaled_law(model: ModelDimensions | ModelSpec, sheet: Datasheet, reference: Profile) -> dict[str, float]:
    """The linear law of a calibrated profile, each term scaled to another model and GPU by what bounds it."""
    known = datasheet(reference.name.partition("/")[0])
    bandwidth = known.bandwidth_bytes_s / sheet.bandwidth_bytes_s
    scale: dict[Bound, float] = {
        "host": 1.0,
        "compute": model.weights_bytes / reference.model.weights_bytes * known.bf16_flops / sheet.bf16_flops,
        "kv": model.kv_bytes_per_token / reference.model.kv_bytes_per_token * bandwidth,
        "adapters": model.lora_bytes_per_rank / reference.model.lora_bytes_per_rank * bandwidth,
    }
    # base_ms is host work but for the reading of weights, which is taken out before scaling.
    scaled = {
        term.name: reference.latency.coefficients.get(term.name, 0.0) * scale[term.bound] for term in LINEAR
    }
    host_ms = scaled["base_ms"] - 1e3 * reference.model.weights_bytes / known.bandwidth_bytes_s
    scaled["base_ms"] = max(0.0, host_ms) + 1e3 * model.weights_bytes / sheet.bandwidth_bytes_s
    return scaled


def _loading(model: ModelDimensions, reference: Profile) -> LoadingSpec:
    """The reference's times, those per rank scaled by the adapter's bytes."""
    bytes_ratio = model.lora_bytes_per_rank / reference.model.lora_bytes_per_rank
    return LoadingSpec(
        host_base_ms=reference.loading.host_base_ms,
        host_per_rank_ms=reference.loading.host_per_rank_ms * bytes_ratio,
        disk_base_ms=reference.loading.disk_base_ms,
        disk_per_rank_ms=reference.loading.disk_per_rank_ms * bytes_ratio,
    )
