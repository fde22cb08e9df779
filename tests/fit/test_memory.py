"""What vLLM takes of a GPU's memory, against servers that were measured."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from packer.errors import IncompatibleError
from packer.fit.estimate import estimate_profile
from packer.fit.models import model_named
from packer.fit.quantization import quantized
from packer.kv_shape import KvShape
from packer.twin.memory.policy import kv_cache_tokens, longest_context, memory_error
from packer.twin.memory.starts import check_starts
from packer.twin.override import with_engine

GIB = 2.0**30
MEASURED = [
    ("meta-llama/Llama-3.1-8B", 1, None, 0.9, 51.38),
    ("Qwen/Qwen3-32B", 1, None, 0.9, 4.45),
    ("Qwen/Qwen3-32B", 2, None, 0.9, 34.49),
    ("meta-llama/Llama-3.3-70B-Instruct", 2, "fp8", 0.9, 32.00),
    ("openai/gpt-oss-20b", 1, None, 0.9, 50.28),
    ("openai/gpt-oss-120b", 1, None, 0.95, 3.33),
    ("Qwen/Qwen3-0.6B", 1, None, 0.9, 64.45),
]
"""KV cache in GiB per GPU on H100 with --max-model-len 16000 (llm-d-incubation/llm-d-planner,
docs/empirical-vllm-memory-results.md, Apache-2.0); the row of gpt-oss-120b adds up to a share of 0.95."""


@pytest.mark.parametrize(("model", "gpus", "quantization", "share", "kv_gib"), MEASURED)
def test_kv_cache_of_measured_servers(
    model: str, gpus: int, quantization: str | None, share: float, kv_gib: float
) -> None:
    """The KV cache is within 2.5 % of the measured one."""
    found = estimate_profile(
        model, "h100-80gb", tensor_parallel_size=gpus, quantization=quantization, max_model_len=16000,
        gpu_memory_utilization=share,
    )  # fmt: skip
    assert found.memory.kv_budget_bytes / gpus / GIB == pytest.approx(kv_gib, rel=0.025)


def test_kv_tokens_of_a_measured_rtx_4090() -> None:
    """vLLM 0.19 had 41,408 tokens beside Llama-3.1-8B (casys-kaist/LLMServingSim, MIT, commit 5daddb2)."""
    found = estimate_profile("meta-llama/Llama-3.1-8B", "rtx4090", max_model_len=32768, version="0.19.0")
    assert (found.engine.max_num_seqs, found.engine.max_num_batched_tokens) == (256, 2048)
    tokens = found.memory.kv_budget_bytes / found.model.kv_bytes_per_token
    assert tokens == pytest.approx(41_408, rel=0.025)


def test_servers_that_do_not_start() -> None:
    """Weights that fill the card are refused, with the next size that the heads allow; a context longer than the KV
    cache is a memory error."""
    with pytest.raises(IncompatibleError, match=r"no memory for a KV cache. What does: --tensor-parallel-size 2."):
        estimate_profile("openai/gpt-oss-120b", "h100-80gb", max_model_len=16000)
    with pytest.raises(IncompatibleError, match=r"no memory for a KV cache\.$"):  # two GPUs are too few, of 10 KV heads
        estimate_profile(replace(model_named("microsoft/phi-4"), layers=120), "l4", max_model_len=4096)
    with pytest.raises(IncompatibleError, match="2 x NVIDIA L40S"):
        estimate_profile("meta-llama/Llama-3.1-70B", "l40s", tensor_parallel_size=2)
    long = estimate_profile("Qwen/Qwen3-32B", "h100-80gb", max_model_len=40_000)
    assert memory_error(long, long.settings(1, 8)) is not None


@pytest.mark.parametrize(
    ("model", "elements"),
    [("moonshotai/Kimi-K2.5", 61 * 576), ("Qwen/Qwen3-235B-A22B", 94 * 256), ("Qwen/Qwen3-8B", 36 * 256)],
)
def test_copies_of_keys_and_values_take_memory(model: str, elements: int) -> None:
    """Each of eight GPUs holds a KV head, or the compressed keys, of a token: slots and memory count in such tokens."""
    found, larger = (
        estimate_profile(model, "b200", tensor_parallel_size=8, max_model_len=8192, gpu_memory_utilization=share)
        for share in (0.9, 0.95)
    )
    given, slots = with_engine(found, gpu_memory_utilization=0.95), found.settings(4, 16)
    assert kv_cache_tokens(given, slots) == kv_cache_tokens(larger, slots)
    one, other = (kv_cache_tokens(found, found.settings(n, 16)) for n in (1, 33))
    slots_bytes = 32 * 16 * found.memory.slot_bytes_per_rank / 8
    assert one - other == pytest.approx(slots_bytes / (2 * elements), abs=1)


def test_further_sequences_take_memory_on_each_gpu() -> None:
    """The sampler runs on every GPU of a group: a setting for a profile leaves no more KV cache than an estimate."""
    found, own = (
        estimate_profile("Qwen/Qwen3-32B", "h100-80gb", tensor_parallel_size=4, max_model_len=8192, max_num_seqs=seqs)
        for seqs in (1024, 2048)
    )
    given, slots = with_engine(found, max_num_seqs=2048), found.settings(4, 16)
    assert kv_cache_tokens(given, slots) <= kv_cache_tokens(own, slots)


QWEN3_ENDS = 2 * (151_936 + 4096)
QWEN3_30B = 48 * (3 * 2048 + (4096 + 512 + 512) / 2 + 4096 / 2 + 2048)
SLOTS = [
    ("Qwen/Qwen3-8B", "0.15.0", 1, 36 * (3 * 4096 + 6144 + 2 * 4096 + 3 * 8192 + 3 * 4096 + 12_288)),
    (
        "Qwen/Qwen3-8B", "0.32.0", 2,
        36 * (3 * 4096 + 6144 / 2 + 4096 / 2 + 3 * 4096 + 12_288 + 12_288 / 2 + 4096) + QWEN3_ENDS,
    ),
    ("Qwen/Qwen3-30B-A3B", "0.32.0", 2, QWEN3_30B),
    (
        "Qwen/Qwen3-30B-A3B", "0.16.0", 2,
        QWEN3_30B + 48 * 128 * 3 * (2048 + 768 / 2) + 2 * (151_936 + 2048),
    ),
    (
        "microsoft/phi-4", "0.32.0", 1,
        40 * (5120 + 7680 + 2 * 5120 + 5120 + 2 * 17_920 + 17_920 + 5120) + 2 * (100_352 + 5120),
    ),
]  # fmt: skip
"""Elements of the tensors `lora_a_stacked` and `lora_b_stacked` of a slot on one GPU, per unit of rank: inputs of A
(vllm/lora/layers: whole in column-parallel layers) and outputs of B (whole in row-parallel layers), embeddings (from
0.16 in Qwen 3), experts (from 0.11.1, unless --lora-target-modules excludes them)."""


@pytest.mark.parametrize(("model", "version", "gpus", "elements"), SLOTS)
def test_slots_are_those_that_vllm_reserves(model: str, version: str, gpus: int, elements: float) -> None:
    """A slot takes the tensors of every layer that the server wraps, and mixtures are started with attention alone."""
    found = estimate_profile(model, "h200", version=version, tensor_parallel_size=gpus, max_model_len=8192)
    assert found.memory.slot_bytes == 0.0
    assert found.memory.slot_bytes_per_rank == pytest.approx(2 * gpus * elements)
    attention = "A3B" in model and version == "0.32.0"
    assert found.engine.lora_target_modules == (("qkv_proj", "o_proj") if attention else ())


@pytest.mark.parametrize(
    ("gpu", "version", "seqs", "tokens"),
    [
        ("b200", None, 1024, 16384), ("h100-80gb", None, 1024, 8192), ("a100-80gb", None, 256, 2048),
        ("l40s", None, 256, 2048), ("h100-80gb", "0.8.5", 1024, 8192),
    ],
)  # fmt: skip
def test_defaults_are_those_of_the_card(gpu: str, version: str | None, seqs: int, tokens: int) -> None:
    """vLLM's defaults follow the memory of the GPU, and changed with its versions."""
    engine = estimate_profile("Qwen/Qwen3-8B", gpu, version=version, max_model_len=4096).engine
    assert (engine.max_num_seqs, engine.max_num_batched_tokens) == (seqs, tokens)


def test_an_fp8_cache_holds_twice_as_many_tokens() -> None:
    """`kv_cache_dtype` fp8 halves the bytes of a token, and the time to read them."""
    whole, half = (
        estimate_profile("Qwen/Qwen3-8B", "h200", kv_cache_dtype=each, max_model_len=8192) for each in ("auto", "fp8")
    )
    assert half.model.kv_bytes_per_token == whole.model.kv_bytes_per_token / 2
    law, other = half.latency.coefficients, whole.latency.coefficients
    assert law["per_kv_token_ms"] < 0.8 * other["per_kv_token_ms"]


def test_sliding_windows_hold_less() -> None:
    """62 layers, 52 with a window, are 7 groups of 10 in vLLM: 6 of them hold the window and the tokens in flight, of
    two steps from 0.14 on."""
    found = estimate_profile("google/gemma-3-27b-it", "h200", max_model_len=65_536)
    assert found.model.kv_bytes_per_token == 2 * 2 * 16 * 128 * 70
    held = (65_536 + 6 * (1024 + 7 + 2 * found.engine.max_num_batched_tokens)) / 7
    assert found.memory.min_kv_tokens == math.ceil(held)
    with pytest.raises(
        IncompatibleError,
        match=r"fewer than a request of max_model_len holds, 33,652.*max-model-len 35840 .or shorter, for more slots",
    ):
        check_starts(estimate_profile("google/gemma-3-27b-it", "h100-80gb"), 32)
    # A last block that is not full takes a whole one in layers that keep all tokens, too.
    partly = estimate_profile("google/gemma-3-27b-it", "h200", max_model_len=65_521)
    assert partly.memory.min_kv_tokens == found.memory.min_kv_tokens
    one_step = estimate_profile("google/gemma-3-27b-it", "h200", max_model_len=65_536, version="0.13.0")
    held = (65_536 + 6 * (1024 + 7 + one_step.engine.max_num_batched_tokens)) / 7
    assert one_step.memory.min_kv_tokens == math.ceil(held)
    old = estimate_profile("google/gemma-3-27b-it", "h200", max_model_len=65_536, version="0.8.5")
    assert (old.model.kv_shape, old.model.kv_bytes_per_token) == (None, 2 * 2 * 16 * 128 * 62)
    assert old.memory.min_kv_tokens == 65_536


@pytest.mark.parametrize(("gpus", "block"), [(1, 784), (8, 400)])
def test_a_state_takes_a_block_of_its_own(gpus: int, block: int) -> None:
    """Qwen 3.5 has three groups of layers without attention for one with it: a block of each holds a state, which more
    GPUs share, while copies of the four KV heads take more."""
    shape = estimate_profile("Qwen/Qwen3.5-27B", "h200", tensor_parallel_size=gpus).model.kv_shape
    assert shape == KvShape(request_tokens=3.5 * block, state_block=block)


@pytest.mark.parametrize(("caching", "least"), [(True, 38_416), (False, 36_064)])
def test_prefix_caching_needs_room_for_two_states(caching: bool, least: int) -> None:
    """The KV cache with which vLLM 0.32 starts, its null block included (`max_memory_usage_bytes` of 16 layers with
    attention and 48 with states in blocks of 784 tokens): within a block."""
    found = estimate_profile("Qwen/Qwen3.5-27B", "h200", max_model_len=32_768)
    found = with_engine(found, prefix_caching=caching)
    assert found.memory.min_kv_tokens == pytest.approx(least, abs=784)
    assert longest_context(found, found.memory.min_kv_tokens) == 32_768


def test_data_parallel_ranks() -> None:
    """Ranks keep compressed keys once each, where tensor-parallel GPUs all keep them; every rank has all slots and all
    weights but the experts, and holds a request of the whole context."""
    model, given = "moonshotai/Kimi-K2.5", {"max_model_len": 8192, "quantization": "nvfp4"}
    group = estimate_profile(model, "b200", tensor_parallel_size=8, **given)
    ranks = estimate_profile(model, "b200", data_parallel_size=8, **given)
    assert (ranks.engine.gpus, ranks.engine.server_seqs) == (8, 8 * ranks.engine.max_num_seqs)
    assert (ranks.gpu, ranks.name) == (group.gpu, "b200-x8-dp8/kimi-k2.5-nvfp4")
    sizes = quantized(model_named(model), "nvfp4")
    copied = 7 * (sizes.weights_bytes - sizes.experts_bytes)
    budget = group.memory.kv_budget_bytes
    assert budget > ranks.memory.kv_budget_bytes > budget - 1.5 * copied
    assert group.model.kv_bytes_per_token == 8 * ranks.model.kv_bytes_per_token
    assert ranks.memory.slot_bytes_per_rank == 8 * ranks.model.lora_bytes_per_rank
    assert group.memory.slot_bytes_per_rank < ranks.memory.slot_bytes_per_rank
    assert ranks.memory.min_kv_tokens == 8 * 8192
    assert ranks.engine.switches == {"enable-expert-parallel": True}
    longer = with_engine(ranks, max_model_len=16384)
    assert longer.memory.min_kv_tokens == 8 * 16384


@pytest.mark.parametrize(
    ("model", "given", "match"),
    [
        ("Qwen/Qwen3-8B", {}, "Plan them as servers"),
        ("Qwen/Qwen3-30B-A3B", {"version": "0.20.2"}, r"since 0\.21, got data_parallel_size 2 with vllm 0\.20\.2"),
        ("Qwen/Qwen3-30B-A3B", {"engine_name": "sglang"}, "with sglang"),
    ],
)
def test_ranks_that_serve_no_adapters_are_refused(model: str, given: dict[str, str], match: str) -> None:
    """Ranks of a dense model are servers of their own, and older versions stop at adapters of divided experts."""
    with pytest.raises(IncompatibleError, match=match):
        estimate_profile(model, "h200", data_parallel_size=2, max_model_len=8192, **given)
