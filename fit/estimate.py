"""A profile from data sheets: an estimate, marked as such wherever it is used.

Memory follows from the model's dimensions. The step law is that of a calibrated server, each term scaled by
what bounds it (a roofline): reading weights and KV cache by the memory's bandwidth, tokens by the arithmetic,
adapters by their bytes over the bandwidth; host work stays as it is.
"""

from __future__ import annotations

from packer import checks
from packer.errors import IncompatibleError, UnknownNameError
from packer.fit.dimensions import BYTES, ModelDimensions
from packer.io.profiles import load_profile
from packer.profile import EngineSpec, GpuSpec, LatencySpec, LoadingSpec, MemorySpec, ModelSpec, Profile
from packer.terms import LINEAR, Bound
from packer.twin.datasheets import Datasheet, datasheet
from packer.twin.override import BYTES_PER_LOGIT

REFERENCE = "h100-64gb/llama-3.1-8b-instruct"
"""The calibrated profile whose step law is scaled."""

RUNTIME_BYTES = 0.53e9
"""CUDA context, communication buffers and allocator slack: what the KV budgets of both calibrated profiles
leave unexplained by weights, activations and logits (0.57 and 0.49 GB)."""

ENGINES = {"vllm": "0.8.5", "sglang": "0.5"}
"""Engines whose memory and slots are modelled, with the version that they are modelled after."""

CAPACITY_BAND = (0.82, 1.22)
"""Real capacity / estimated, each of the two calibrated profiles estimated from the other one (same GPU, another
model): the lower 5th and the higher 95th percentile of the two, over 300 servers each."""

BAND_KEYS = ("estimated_capacity_low", "estimated_capacity_high")
"""Keys of that band in the errors of an estimate."""

LINK_LATENCY_S = 15e-6
"""Of an all-reduce of a few tokens between the GPUs of a node: two for each layer and step."""


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
    tensor_parallel_size: int = 1,
    reference: str = REFERENCE,
) -> Profile:
    """An uncalibrated profile of one model on one GPU of `packer.twin.datasheets`, or on several as one server.

    Its `errors` have `CAPACITY_BAND`. The price is that of all its GPUs. `reference`: the calibrated profile whose
    step law is scaled.

    Raises `UnknownNameError`: there is no data sheet of that GPU, or the engine is none of `ENGINES`;
    `IncompatibleError`: the weights alone don't fit.
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
        tensor_parallel_size=tensor_parallel_size,
    )
    if model.heads % tensor_parallel_size:
        raise IncompatibleError(
            f"Expected a tensor_parallel_size that divides the {model.heads} attention heads of {model.name}, got "
            f"{tensor_parallel_size}."
        )
    budget = kv_budget_bytes(model, sheet, engine)
    if budget <= 0:
        raise IncompatibleError(
            f"{model.name} needs {model.weights_bytes / 1e9:.1f} GB for its weights: {sheet.title} leaves no "
            "memory for a KV cache."
        )
    if price_per_hour is not None:
        checks.real("the price per hour", price_per_hour, low=0.0)
    known, n = load_profile(reference), tensor_parallel_size
    price = None if sheet.price_per_hour is None else n * sheet.price_per_hour
    return Profile(
        name=name or f"{sheet.name}{f'-x{n}' if n > 1 else ''}/{model.name}",
        model=ModelSpec(
            model.name,
            model.weights_bytes,
            model.kv_bytes_per_token,
            model.lora_bytes_per_rank,
            model.repository,
        ),
        gpu=GpuSpec(sheet.title, n * sheet.memory_bytes, price if price_per_hour is None else price_per_hour),
        engine=engine,
        memory=MemorySpec(
            budget,
            0.0 if sglang else model.slot_bytes * _copies(n),
            (model.lora_bytes_per_rank if sglang else model.slot_bytes_per_rank) * _copies(n),
            engine.max_model_len,
        ),
        latency=_latency(model, sheet, known, n),
        loading=_loading(model, known, spares_batch=sglang),
        calibrated=False,
        errors=dict(zip(BAND_KEYS, CAPACITY_BAND, strict=True)),
        provenance={
            "method": f"estimated from the model's dimensions and the data sheet of {sheet.title}; step law "
            f"scaled from {known.name}"
        },
    )


def kv_budget_bytes(model: ModelDimensions, sheet: Datasheet, engine: EngineSpec) -> float:
    """Bytes left for KV cache and adapter slots on all GPUs of a server; may be < 0.

    Weights and KV heads are split over the GPUs; activations, logits and the rest are on each.

    vLLM takes its profiling run from `gpu_memory_utilization`; SGLang leaves activations outside of
    `--mem-fraction-static`, and allocates the slots before the KV cache (model_runner.py, mem_pool.py).
    """
    n = engine.tensor_parallel_size
    copies = max(1.0, n / model.kv_heads)  # with fewer KV heads than GPUs each of them is on several
    if engine.name == "sglang":
        left = n * (sheet.memory_bytes * engine.gpu_memory_utilization - RUNTIME_BYTES) - model.weights_bytes
        return left / copies if left > 0 else left
    activations = BYTES * engine.max_num_batched_tokens * 3 * model.intermediate
    logits = BYTES_PER_LOGIT * engine.max_num_seqs * model.vocabulary
    available = n * sheet.memory_bytes * engine.gpu_memory_utilization
    budget = available - model.weights_bytes - n * (activations + logits + RUNTIME_BYTES)
    return budget / copies if budget > 0 else budget


def _copies(n: int) -> float:
    """Copies of an adapter on a server of `n` GPUs: one of its two matrices is split, the other is on each (vLLM
    without `fully_sharded_loras`)."""
    return (n + 1) / 2.0


def _latency(model: ModelDimensions, sheet: Datasheet, reference: Profile, n: int) -> LatencySpec:
    """The scaled law; on several GPUs with two all-reduces a layer of the hidden state, each sent and received
    (n − 1) / n times."""
    scaled = scaled_law(model, sheet, reference, n)
    if n > 1:
        token_ms = 1e3 * 2 * model.layers * 2 * BYTES * model.hidden * (n - 1) / n / sheet.link_bytes_s
        scaled["base_ms"] += 1e3 * 2 * model.layers * LINK_LATENCY_S
        for term in ("per_decode_ms", "per_prefill_token_ms"):
            scaled[term] += token_ms
    rounded = {term: float(f"{value:.6g}") for term, value in scaled.items() if value > 0}
    return LatencySpec("linear", rounded, reference.latency.graph_max_tokens)


def scaled_law(
    model: ModelDimensions | ModelSpec, sheet: Datasheet, reference: Profile, n: int = 1
) -> dict[str, float]:
    """The linear law of a calibrated profile, each term scaled to another model and `n` GPUs by what bounds it."""
    known = datasheet(reference.name.partition("/")[0])
    bandwidth = known.bandwidth_bytes_s / sheet.bandwidth_bytes_s
    weights = model.active_bytes if isinstance(model, ModelDimensions) else model.weights_bytes
    scale: dict[Bound, float] = {
        "host": 1.0,
        "compute": weights / reference.model.weights_bytes * known.bf16_flops / sheet.bf16_flops / n,
        "kv": model.kv_bytes_per_token / reference.model.kv_bytes_per_token * bandwidth / n,
        "adapters": model.lora_bytes_per_rank
        / reference.model.lora_bytes_per_rank
        * bandwidth
        * _copies(n)
        / n,
    }
    # base_ms is host work but for the reading of weights, which is taken out before scaling.
    scaled = {
        term.name: reference.latency.coefficients.get(term.name, 0.0) * scale[term.bound] for term in LINEAR
    }
    host_ms = scaled["base_ms"] - 1e3 * reference.model.weights_bytes / known.bandwidth_bytes_s
    scaled["base_ms"] = max(0.0, host_ms) + 1e3 * model.weights_bytes / sheet.bandwidth_bytes_s / n
    return scaled


def _loading(model: ModelDimensions, reference: Profile, *, spares_batch: bool) -> LoadingSpec:
    """The reference's times, those per rank scaled by the adapter's bytes."""
    ratio, known = model.lora_bytes_per_rank / reference.model.lora_bytes_per_rank, reference.loading
    host_ms, disk_ms = known.host_per_rank_ms * ratio, known.disk_per_rank_ms * ratio
    return LoadingSpec(known.host_base_ms, host_ms, known.disk_base_ms, disk_ms, spares_batch=spares_batch)
