"""Estimate a profile from a model's config and a GPU's data sheet; the profile is marked as an estimate.

Memory follows vLLM's own rules (`packer.fit.memory`). The base model's step law comes from a roofline with measured
shares of the peaks (`packer.fit.roofline`). The terms of adapters come from a calibrated server, each scaled by the
resource that bounds it (`packer.fit.scaled`); the front end is copied from this server. `errors` hold the errors that
were measured for estimates of the same kind (`packer.fit.bands`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from packer import checks
from packer.engine_spec import EngineSpec
from packer.errors import IncompatibleError, UnknownNameError, ValidationError, shown
from packer.fit.bands import band_errors, kind_of
from packer.fit.dimensions import BYTES, LORA_MODULES, QUANTIZATIONS, ModelDimensions
from packer.fit.kv_cache import kv_cache
from packer.fit.memory import kv_budget, slot_bytes
from packer.fit.models import model_named
from packer.fit.quantization import quantized
from packer.fit.roofline import Roofline, law_terms
from packer.fit.scaled import scaled_law
from packer.io.profiles import load_profile
from packer.profile import WEIGHTS, GpuSpec, LatencySpec, LoadingSpec, MemorySpec, ModelSpec, Profile
from packer.public import public
from packer.terms import LINEAR
from packer.twin.datasheets import Datasheet, datasheet
from packer.twin.engine_rules import MODULES, OLDEST, rules_of, server_defaults
from packer.twin.memory.policy import least_kv_tokens
from packer.twin.override import VERSION

REFERENCE = "h100-64gb/llama-3.1-8b-instruct"  # The calibrated profile whose terms of adapters are scaled.
ENGINES = {"vllm": "0.32.0", "sglang": "0.5"}  # Engines whose memory and slots are modelled, with the version modelled.

KV_CACHE_DTYPES = {"auto": None, "bfloat16": 2.0, "fp8": 1.0}  # Bytes of a KV cache element by `--kv-cache-dtype`.

_RANKS_SINCE = (0, 21)
"""First vLLM that serves adapters with `--enable-expert-parallel` (vllm-project/vllm, PR 40867): tokens are sent to the
experts with the slot of their adapter. In earlier versions an assertion in vllm/lora/layers/fused_moe.py fails."""


@public
def estimate_profile(
    model: str | ModelDimensions, gpu: str, *, tensor_parallel_size: int = 1, data_parallel_size: int = 1,
    quantization: str | None = None, kv_cache_dtype: str = "auto", lora_target_modules: Sequence[str] = (),
    version: str | None = None, max_model_len: int | None = None, max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None, gpu_memory_utilization: float = 0.9,
    price_per_hour: float | None = None, name: str | None = None, engine_name: str = "vllm",
    reference: str = REFERENCE,
) -> Profile:  # fmt: skip
    """Estimate a profile of a base model on GPUs of one kind.

    `model`: a repository known to packer or in Hugging Face's cache on this machine, or the path of a config.json.
    `gpu`: a name as people type it, such as "h200" or "A100-80GB"; "a100" alone is ambiguous.
    `tensor_parallel_size`: GPUs of one server, or of each of its data-parallel ranks.
    `data_parallel_size`: ranks of a mixture of experts. Each rank has its own requests, KV cache, slots and copy of the
    other weights; the experts are divided among the GPUs of all ranks (`--enable-expert-parallel`).
    `quantization`: fp8, int8, awq, gptq, nvfp4, mxfp4 or bf16; None: as the model's config says.
    `kv_cache_dtype`: "auto", "bfloat16" or "fp8". With "auto", memory is computed for bf16, and step times for the
    cache of the measured servers: FP8 for NVFP4 and dense FP8 checkpoints, else bf16.
    `lora_target_modules`: vLLM's flag, since 0.19: the modules with LoRA, of qkv_proj, o_proj, gate_up_proj and
    down_proj; empty: all, of a mixture of experts those of attention.
    `version`: vLLM's version; None: the newest one whose rules are known. Settings that are not given have the
    defaults of this version for the GPU.
    `max_model_len`: None: the model's maximum.
    `max_num_seqs`, `max_num_batched_tokens`, `gpu_memory_utilization`: vLLM's settings, for each rank.
    `price_per_hour`: price of one server with all its GPUs, USD; None: from the data sheet.
    `name`: None: GPU/model.
    `engine_name`: "vllm" or "sglang".
    `reference`: the calibrated profile whose terms of adapters are scaled.

    Raises `UnknownNameError`: the model, the GPU, the quantisation or the engine is not known; `IncompatibleError`:
    the weights alone don't fit, the GPUs do not divide the heads, the model has no such LoRA modules, or data-parallel
    ranks are not supported; `ValidationError`: the GPU's name is ambiguous, or a setting is invalid.
    """
    sheet = datasheet(gpu)
    own = model if isinstance(model, ModelDimensions) else model_named(model)
    sizes = _with_modules(quantized(own, quantization), lora_target_modules)
    n = _checked_gpus(sizes, tensor_parallel_size, engine_name, kv_cache_dtype)
    _check_settings(
        sizes, engine_name, version, max_model_len=max_model_len, max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )  # fmt: skip
    engine = EngineSpec(
        name=engine_name, version=version or ENGINES[engine_name], block_size=1 if engine_name == "sglang" else 16,
        max_model_len=max_model_len or sizes.max_model_len, max_num_batched_tokens=2048, max_num_seqs=1,
        gpu_memory_utilization=gpu_memory_utilization, tensor_parallel_size=n,
        data_parallel_size=checks.integer("data_parallel_size", data_parallel_size, low=1, high=64),
        quantization="fp8" if own.quantization is None and sizes.quantization == "fp8" else None,
        kv_cache_dtype=None if kv_cache_dtype == "auto" else kv_cache_dtype, lora_target_modules=sizes.lora_modules,
    )  # fmt: skip
    rules_of(engine := _with_defaults(engine, sizes, sheet, max_num_batched_tokens, max_num_seqs))
    if not (sizes.kv_rank or sizes.state_layers):
        sizes = replace(sizes, lora_modules=engine.lora_target_modules)
    _check_ranks(sizes, engine)
    known, kind = load_profile(reference), kind_of(sizes, sheet, engine.data_parallel_size)
    sources = {
        "method": f"estimated: roofline of {sheet.title} with measured shares of its peaks ({kind}); "
        f"terms of adapters scaled from {known.name}"
    }
    price = price_per_hour
    if price is not None:
        checks.real("the price per hour", price, low=0.0)
    elif sheet.price_per_hour is not None:
        price = engine.gpus * sheet.price_per_hour
        sources |= {"price": sheet.price_source} if sheet.price_source else {}
    if not (sizes.quantization == own.quantization or engine.quantization or own.repository is None):
        # vLLM does not quantise the weights itself: a server needs another repository than the model's
        sources[WEIGHTS] = f"{sizes.quantization or 'bf16'}, not those of {own.repository}"
    cache_bytes = KV_CACHE_DTYPES[kv_cache_dtype]
    kv_bytes, shape = kv_cache(sizes, engine, cache_bytes or BYTES)
    spec = ModelSpec(sizes.name, sizes.weights_bytes, kv_bytes, sizes.lora_bytes_per_rank, sizes.repository, shape)
    least = least_kv_tokens(spec, engine)
    return Profile(
        name=name or _name(sizes, sheet, engine), model=spec, engine=engine, provenance=sources,
        gpu=GpuSpec(sheet.title, engine.gpus * sheet.memory_bytes, price),
        memory=MemorySpec(kv_budget(sizes, sheet, engine), *slot_bytes(sizes, engine), least),
        latency=_latency(sizes, sheet, engine, known, cache_bytes),
        loading=_loading(sizes, known, spares_batch=engine.name == "sglang"),
        frontend=replace(known.frontend, scrape_interval_s=None),
        errors=band_errors(kind, "experts" if sizes.experts else "dense"),
    )  # fmt: skip


def _with_defaults(
    engine: EngineSpec, sizes: ModelDimensions, sheet: Datasheet, tokens: int | None, seqs: int | None
) -> EngineSpec:
    """Return the engine with the given tokens and sequences per batch, or vLLM's defaults for the GPU. Slots of a
    mixture of experts hold attention only, because vLLM by itself reserves them for every expert."""
    modules = engine.lora_target_modules
    if sizes.experts and engine.release >= MODULES:
        modules = modules or sizes.attention_modules
    release = engine.release if engine.name == "vllm" else OLDEST
    usual_tokens, usual_seqs = server_defaults(release, sheet.memory_bytes, sheet.title)
    batch = tokens or max(usual_tokens, seqs or 0)
    seqs = seqs or min(usual_seqs, batch)
    return replace(engine, max_num_batched_tokens=batch, max_num_seqs=seqs, lora_target_modules=modules)


def _checked_gpus(sizes: ModelDimensions, gpus: int, engine_name: str, kv_cache_dtype: str) -> int:
    """Return the GPUs of a rank; raises if a name is unknown or the GPUs do not divide the attention heads."""
    if engine_name not in ENGINES:
        raise UnknownNameError("engine", engine_name, ENGINES)
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise UnknownNameError("kv_cache_dtype", kv_cache_dtype, KV_CACHE_DTYPES)
    n = checks.integer("tensor_parallel_size", gpus, low=1, high=64)
    if not sizes.splits_over(n):
        rule = f"Expected a tensor_parallel_size that divides the {sizes.heads} attention heads of {sizes.name}"
        raise IncompatibleError(f"{rule}, and divides its {sizes.kv_heads} KV heads or is a multiple of them, got {n}.")
    return n


def _check_ranks(sizes: ModelDimensions, engine: EngineSpec) -> None:
    """Raise `IncompatibleError` if the model or the engine cannot serve LoRA on several data-parallel ranks."""
    ranks, since = engine.data_parallel_size, ".".join(map(str, _RANKS_SINCE))
    if ranks == 1:
        return
    if not sizes.experts:
        said = f"Expected data_parallel_size 1 for {sizes.name}, got {ranks}: ranks of a dense model share nothing."
        raise IncompatibleError(f"{said} Plan them as servers: packer counts and places these itself.")
    if engine.name != "vllm" or engine.release < _RANKS_SINCE:
        rule = f"vLLM serves LoRA with experts on data-parallel ranks since {since}"
        raise IncompatibleError(f"{rule}, got data_parallel_size {ranks} with {engine.name} {engine.version}.")


def _check_settings(sizes: ModelDimensions, engine_name: str, version: str | None, **counts: int | None) -> None:
    """Raise `ValidationError` for an invalid version or number, `IncompatibleError` for a length that vLLM refuses.
    Source: vllm/config/model.py, `_get_and_verify_max_len`."""
    if version is not None and engine_name == "vllm" and not VERSION.fullmatch(version):
        raise ValidationError(f"Expected a version of vLLM as 0.11.0, got {shown(version)}.")
    for name, value in counts.items():
        if value is not None:
            checks.integer(name, value, low=1)
    if (longest := counts["max_model_len"]) is not None and longest > sizes.max_model_len:
        rule = f"Expected a max_model_len up to {sizes.max_model_len:,}, the longest context of {sizes.name},"
        raise IncompatibleError(f"{rule} beyond which vLLM does not start, got {longest:,}.")


def _with_modules(sizes: ModelDimensions, modules: Sequence[str]) -> ModelDimensions:
    """Return the model with LoRA on these modules; raises `IncompatibleError` if it does not have them."""
    if not modules:
        return sizes
    own = LORA_MODULES[:2] if sizes.experts else LORA_MODULES
    chosen = tuple(name for name in LORA_MODULES if name in modules)
    unknown = [name for name in modules if name not in own]
    if sizes.kv_rank or sizes.state_layers or unknown:
        known = "none" if sizes.kv_rank or sizes.state_layers else ", ".join(own)
        rule = f"Expected lora_target_modules of {sizes.name} among {known}"
        raise IncompatibleError(f"{rule}, got {shown(', '.join(map(str, modules)))}.")
    return replace(sizes, lora_modules=chosen)


def _name(sizes: ModelDimensions, sheet: Datasheet, engine: EngineSpec) -> str:
    """Return GPU, number of GPUs and model, with the quantisation unless the model's name contains it."""
    n, ranks = engine.gpus, engine.data_parallel_size
    stored, kind = sizes.quantization, (sizes.quantization or "").partition("-")[0]
    said = "" if kind in sizes.name or stored in ("mxfp4", "int4-experts") else f"-{kind}"
    groups = f"-x{n}" if n > 1 else ""
    return f"{sheet.name}{groups}{f'-dp{ranks}' if ranks > 1 else ''}/{sizes.name}{said}"


def _latency(
    sizes: ModelDimensions, sheet: Datasheet, engine: EngineSpec, known: Profile, cache_bytes: float | None
) -> LatencySpec:
    """Combine the base model's terms from the roofline with the other terms scaled from the profile `known`."""
    if cache_bytes is None:
        in_fp8 = QUANTIZATIONS[sizes.quantization or "bf16"].get("fp8_cache", ())
        cache_bytes = 1.0 if ("experts" if sizes.experts else "dense") in in_fp8 else BYTES
    n, ranks = engine.tensor_parallel_size, engine.data_parallel_size
    terms, ridge, share = law_terms(Roofline(sizes, sheet, n, cache_bytes, ranks))
    scaled = scaled_law(sizes, sheet, known, n)
    own = {term.name: scaled.get(term.name, 0.0) for term in LINEAR if term.part != "model"}
    rounded = {name: float(f"{value:.6g}") for name, value in (terms | own).items() if value > 0.0}
    return LatencySpec("linear", rounded, known.latency.graph_max_tokens, ridge, share)


def _loading(model: ModelDimensions, reference: Profile, *, spares_batch: bool) -> LoadingSpec:
    """Return the reference's loading times, with the times per rank scaled by the bytes of an adapter."""
    ratio, known = model.lora_bytes_per_rank / reference.model.lora_bytes_per_rank, reference.loading
    host_ms, disk_ms = known.host_per_rank_ms * ratio, known.disk_per_rank_ms * ratio
    return LoadingSpec(known.host_base_ms, host_ms, known.disk_base_ms, disk_ms, spares_batch=spares_batch)
