"""Profiles from data sheets."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from packer.errors import FileFormatError, IncompatibleError, UnknownNameError, ValidationError
from packer.fit.dimensions import ModelDimensions
from packer.fit.estimate import estimate_profile
from packer.fit.memory import slot_bytes
from packer.fit.model_config import read_model_config
from packer.io.profiles import format_profile, load_profile, parse_profile
from packer.predictors.features import COLUMN
from packer.predictors.scenarios import scenario
from packer.profile import Profile
from packer.terms import LINEAR_TERMS
from packer.twin.datasheets import GPUS
from packer.twin.engine_rules import rules_of
from packer.twin.margin import BAND_KEYS
from packer.twin.memory.policy import kv_cache_tokens, memory_error
from packer.twin.override import with_engine

LLAMA, QWEN = "llama-3.1-8b", "qwen-2.5-7b"
CALIBRATED = [(LLAMA, "h100-64gb/llama-3.1-8b-instruct"), (QWEN, "h100-64gb/qwen-2.5-7b-instruct")]


def dimensions(root: Path, model: str) -> ModelDimensions:
    return read_model_config(root / "tests" / "data" / "models" / f"{model}.json")


def config(root: Path, model: str = LLAMA, **changes: Any) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((root / "tests" / "data" / "models" / f"{model}.json").read_text())
    return {key: value for key, value in (data | changes).items() if value != "absent"}


def read(tmp_path: Path, data: Any) -> ModelDimensions:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(data))
    return read_model_config(path)


@pytest.mark.parametrize(("model", "name"), CALIBRATED)
def test_dimensions_of_measured_models(root: Path, model: str, name: str) -> None:
    """Weights, KV and adapter bytes are those of the calibrated profiles; slots those fitted, to 1 %."""
    found, known = dimensions(root, model), load_profile(name)
    assert found.weights_bytes == known.model.weights_bytes
    assert found.kv_bytes_per_token == known.model.kv_bytes_per_token
    assert found.lora_bytes_per_rank == known.model.lora_bytes_per_rank
    assert slot_bytes(found, known.engine)[1] == pytest.approx(known.memory.slot_bytes_per_rank, rel=0.01)


@pytest.mark.parametrize(("model", "name"), CALIBRATED)
def test_kv_capacity_is_near_the_measured_one(root: Path, model: str, name: str) -> None:
    """At every measured point the estimated KV cache is within 10 % of the real one."""
    known = load_profile(name)
    estimate = estimate_profile(
        dimensions(root, model), "h100-64gb", max_num_seqs=known.engine.max_num_seqs, version=known.engine.version
    )
    assert len(known.memory.measured) > 20
    for max_loras, rank, tokens in known.memory.measured:
        assert kv_cache_tokens(estimate, estimate.settings(max_loras, rank)) == pytest.approx(tokens, rel=0.10)


def step_ms(profile: Profile, decodes: int, adapters: int, rank: int, context: int) -> float:
    """Time of a decode step with as many slots as adapters, written out from the law's definition."""
    c = dict.fromkeys(LINEAR_TERMS, 0.0) | dict(profile.latency.coefficients)
    step = c["base_ms"] + c["per_decode_ms"] * decodes + c["per_kv_token_ms"] * decodes * context
    if adapters:
        step += c["first_adapter_ms"] + c["per_slot_ms"] * adapters + c["per_slot_rank_ms"] * rank
        step += decodes * (c["per_lora_token_ms"] + c["per_slot_token_ms"] * adapters)
        step += decodes * (c["per_slot_rank_token_ms"] * rank + c["per_adapter_token_ms"] * adapters)
        step += adapters * (c["per_adapter_ms"] + c["per_rank_ms"] * rank)
    return step


@pytest.mark.parametrize(("decodes", "adapters"), [(1, 0), (32, 8), (128, 32), (256, 64)])
def test_another_models_step_is_near_the_measured_one(root: Path, decodes: int, adapters: int) -> None:
    """Qwen's decode step, estimated from Llama's, is within a factor of 1.5 of that fitted to Qwen's runs."""
    known = load_profile("h100-64gb/qwen-2.5-7b-instruct")
    estimate = estimate_profile(dimensions(root, QWEN), "h100-64gb")
    ratio = step_ms(estimate, decodes, adapters, 16, 360) / step_ms(known, decodes, adapters, 16, 360)
    assert 1 / 1.5 < ratio < 1.5


@pytest.mark.parametrize("gpu", GPUS)
def test_every_gpu_gives_a_sound_profile(root: Path, gpu: str) -> None:
    """Each data sheet gives a profile that is marked as estimated, reads back, and holds some KV cache."""
    profile = estimate_profile(dimensions(root, LLAMA), gpu, max_model_len=4096)
    assert not profile.calibrated
    assert profile.label.endswith("(estimated, not calibrated)")
    assert profile.name == f"{gpu}/llama-3.1-8b-instruct"
    assert parse_profile(format_profile(profile)) == profile
    assert memory_error(profile, profile.settings(1, 8)) is None
    assert profile.latency.coefficients["base_ms"] > 1e3 * profile.model.weights_bytes / GPUS[gpu].bandwidth_bytes_s


def test_a_faster_gpu_is_faster_and_a_larger_one_holds_more(root: Path) -> None:
    """Bandwidth shortens the step, memory enlarges the cache, and more sequences cost memory."""
    model = dimensions(root, LLAMA)
    small, large = estimate_profile(model, "l40s"), estimate_profile(model, "h200-141gb")
    assert step_ms(large, 64, 8, 16, 400) < step_ms(small, 64, 8, 16, 400)
    assert kv_cache_tokens(large, large.settings(8, 16)) > kv_cache_tokens(small, small.settings(8, 16))
    many = estimate_profile(model, "l40s", max_num_seqs=1024)
    assert kv_cache_tokens(many, many.settings(8, 16)) < kv_cache_tokens(small, small.settings(8, 16))


def test_published_parameter_counts(root: Path, tmp_path: Path) -> None:
    """Parameters, counted from the config, are those published: tied embeddings, head_dim, biases, norms."""
    mistral = config(root, model_type="mistral", vocab_size=32768, max_position_embeddings=32768)
    qwen3 = config(
        root,
        model_type="qwen3",
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=True,
    )
    gemma2 = config(
        root,
        model_type="gemma2",
        hidden_size=3584,
        intermediate_size=14336,
        num_hidden_layers=42,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=256,
        vocab_size=256000,
        tie_word_embeddings="absent",
    )
    smollm3 = config(
        root, model_type="smollm3", hidden_size=2048, intermediate_size=11008, num_hidden_layers=36,
        num_attention_heads=16, num_key_value_heads=4, tie_word_embeddings="absent",
    )  # fmt: skip
    published = ((mistral, 7_248_023_552), (qwen3, 4_022_468_096), (gemma2, 9_241_705_984), (smollm3, 3_075_098_624))
    for data, parameters in published:
        assert read(tmp_path, data).weights_bytes == 2 * parameters


def test_multimodal_configs_use_their_text_part(root: Path, tmp_path: Path) -> None:
    """A config that nests its language model is read there."""
    nested = {"model_type": "gemma3", "text_config": config(root, model_type="gemma3_text")}
    assert read(tmp_path, nested).kind == "gemma3_text"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_local_experts": 8, "model_type": "mixtral"}, FileFormatError, "num_experts_per_tok.*missing"),
        (
            {"num_local_experts": 2, "num_experts_per_tok": 8, "model_type": "mixtral"},
            FileFormatError,
            r"num_experts_per_tok .*in \[1, 2\], got 8",
        ),
        ({"layer_types": ["sliding_attention"] * 40}, FileFormatError, "for each of the 32 layers, got 40"),
        ({"num_key_value_heads": 64}, FileFormatError, r"num_key_value_heads .*in \[1, 32\], got 64"),
        ({"quantization_config": {"bits": 4}}, IncompatibleError, "or 8 bits, got .*--quantization awq"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, IncompatibleError, "4 or 8 bits"),
        ({"quantization_config": "int4"}, IncompatibleError, "4 or 8 bits"),
        ({"model_type": "gpt2"}, IncompatibleError, "vLLM serves it without LoRA"),
        ({"model_type": "rwkv"}, IncompatibleError, "model_type to be one of .* give the nearest"),
        ({"model_type": "absent"}, IncompatibleError, "got None"),
        ({"hidden_size": "absent"}, FileFormatError, "key 'hidden_size': this key is missing"),
        ({"hidden_size": -1}, FileFormatError, "hidden_size .*got -1"),
        ({"vocab_size": "many"}, FileFormatError, "vocab_size .*got 'many'"),
        ({"tie_word_embeddings": "yes"}, FileFormatError, "tie_word_embeddings.*'yes'"),
    ],
)
def test_what_cannot_be_estimated_is_refused(
    root: Path, tmp_path: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    """Models that the formulas don't fit, and configs that make no sense, are refused with the reason."""
    with pytest.raises(error, match=message):
        read(tmp_path, config(root, **changes))


def test_too_large_a_model_and_unknown_gpus(root: Path, tmp_path: Path) -> None:
    """Weights that don't fit, and a GPU without a data sheet, are refused."""
    large = read(tmp_path, config(root, num_hidden_layers=80, hidden_size=8192, intermediate_size=28672))
    with pytest.raises(IncompatibleError, match="GB for its weights"):
        estimate_profile(large, "l4")
    with pytest.raises(UnknownNameError, match="Did you mean 'h100-80gb'"):
        estimate_profile(large, "h100-80g")


def test_sglang_keeps_its_slots_apart(root: Path) -> None:
    """SGLang reserves slots of the largest rank, keeps activations outside its share, and spares the running batch."""
    llama = dimensions(root, LLAMA)
    ours, theirs = (estimate_profile(llama, "h100-80gb", engine_name=name) for name in ("vllm", "sglang"))
    assert (theirs.engine.name, theirs.engine.block_size) == ("sglang", 1)
    assert theirs.loading.spares_batch
    assert not ours.loading.spares_batch
    slot = kv_cache_tokens(theirs, theirs.settings(1, 16)) - kv_cache_tokens(theirs, theirs.settings(2, 16))
    assert slot * llama.kv_bytes_per_token == pytest.approx(16 * llama.lora_bytes_per_rank, abs=2**18)
    assert theirs.memory.kv_budget_bytes > ours.memory.kv_budget_bytes
    with pytest.raises(UnknownNameError, match="Known: sglang, vllm"):
        estimate_profile(llama, "h100-80gb", engine_name="tensorrt-llm")


def test_a_config_names_its_repository(tmp_path: Path, root: Path) -> None:
    """A start command gets the repository that the config names; a local path is none."""
    for said, wanted in (("acme/toy-7b", "acme/toy-7b"), ("/models/toy", None), ("./toy", None), (7, None)):
        read_ = read(tmp_path, config(root, _name_or_path=said))
        assert read_.repository == wanted
        assert estimate_profile(read_, "h100-80gb").model.repository == wanted


def test_mixtures_of_experts(root: Path, tmp_path: Path) -> None:
    """Mixtral 8x7B has 46.7 billion weights, of which a token is multiplied with 12.9; LoRA is on attention."""
    mixtral = read(
        tmp_path,
        config(
            root,
            model_type="mixtral",
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            vocab_size=32000,
            num_local_experts=8,
            num_experts_per_tok=2,
        ),
    )
    assert mixtral.weights_bytes / 2 == pytest.approx(46.7e9, rel=0.002)
    assert mixtral.active_bytes / 2 == pytest.approx(12.9e9, rel=0.005)
    dense = read(tmp_path, config(root))
    assert mixtral.lora_bytes_per_rank < dense.lora_bytes_per_rank
    law = estimate_profile(mixtral, "h200-141gb", max_model_len=8192).latency
    slow = estimate_profile(dense, "h200-141gb", max_model_len=8192).latency
    assert law.expert_share == 2 / 8
    assert law.coefficients["experts_ms"] > 2 * law.coefficients["base_ms"]  # most of its weights
    whole = law.coefficients["base_ms"] + law.coefficients["experts_ms"]
    assert whole > 2 * slow.coefficients["base_ms"]


@pytest.mark.parametrize(
    ("given", "bits"),
    [
        ({"quant_method": "fp8"}, 8.0),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4.125),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, 4.3125),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.125),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8}}}}, 8.0),
    ],
)
def test_quantised_weights(root: Path, tmp_path: Path, given: dict[str, Any], bits: float) -> None:
    """Linear layers have so many bits, embeddings stay in bf16; the KV cache gets what is saved."""
    whole, small = read(tmp_path, config(root)), read(tmp_path, config(root, quantization_config=given))
    ends = 2 * 2 * whole.vocabulary * whole.hidden
    linear = whole.weights_bytes - ends
    assert small.weights_bytes == pytest.approx(linear * bits / 16 + ends, rel=1e-3)
    assert small.active_bytes == whole.weights_bytes
    one, other = (estimate_profile(each, "l40s", max_model_len=8192) for each in (whole, small))
    saved = whole.weights_bytes - small.weights_bytes
    assert other.memory.kv_budget_bytes - one.memory.kv_budget_bytes == pytest.approx(saved)


@pytest.mark.parametrize(
    "given",
    [
        {"max_num_seqs": 0},
        {"max_model_len": 0},
        {"max_num_batched_tokens": -1},
        {"version": "x"},
        {"version": ""},
        {"version": 0.33},
        {"quantization": 8},
    ],
)
def test_settings_that_are_none_are_refused(given: dict[str, Any]) -> None:
    """A 0 is not taken for "as vLLM has it", nor a word for a version."""
    with pytest.raises(ValidationError, match="Expected"):
        estimate_profile("Qwen/Qwen3-8B", "h200", **given)


def test_slots_hold_the_modules_that_the_server_is_told() -> None:
    """Parts of the modules add up to an adapter of all, take less memory and time, and the server is started so."""
    whole = estimate_profile("Qwen/Qwen3-8B", "h100-80gb", max_model_len=8192)
    parts = [
        estimate_profile("Qwen/Qwen3-8B", "h100-80gb", max_model_len=8192, lora_target_modules=names)
        for names in (("o_proj", "qkv_proj"), ("gate_up_proj",), ("down_proj",))
    ]
    total = sum(part.model.lora_bytes_per_rank for part in parts)
    assert total == whole.model.lora_bytes_per_rank
    settings = whole.settings(32, 16)
    for part in parts:
        assert kv_cache_tokens(part, settings) > kv_cache_tokens(whole, settings)
        for term in ("per_adapter_ms", "per_slot_ms"):
            assert part.latency.coefficients[term] < whole.latency.coefficients[term]
    assert parts[0].engine.arguments == {"lora-target-modules": ["qkv_proj", "o_proj"]}
    assert parse_profile(format_profile(parts[0])) == parts[0]
    every = estimate_profile(
        "Qwen/Qwen3-8B", "h100-80gb", max_model_len=8192,
        lora_target_modules=("down_proj", "qkv_proj", "o_proj", "gate_up_proj"),
    )  # fmt: skip
    assert every.latency == whole.latency
    assert kv_cache_tokens(every, settings) > kv_cache_tokens(whole, settings)  # no embeddings in its slots
    names, mixture = (("qkv_proj", "o_proj"), ()), "Qwen/Qwen3-30B-A3B"
    same = [estimate_profile(mixture, "h200", lora_target_modules=each).fingerprint for each in names]
    assert same[0] == same[1]
    for model, names, settings_of in (
        ("Qwen/Qwen3-8B", ("q_proj",), {}),
        ("moonshotai/Kimi-K2.5", ("o_proj",), {"tensor_parallel_size": 8}),
    ):
        with pytest.raises(IncompatibleError, match="lora_target_modules"):
            estimate_profile(model, "h200", lora_target_modules=names, **settings_of)  # type: ignore[arg-type]
    early: tuple[dict[str, Any], ...] = ({"version": "0.18.1"}, {"engine_name": "sglang"})
    for engine in early:
        with pytest.raises(
            ValidationError, match=r"from 0\.19 on with lora_target_modules, got '(vllm 0\.18\.1|sglang)"
        ):
            estimate_profile("Qwen/Qwen3-8B", "h200", lora_target_modules=("o_proj",), **engine)
    with pytest.raises(ValidationError, match=r"got 'vllm 0\.18\.1'"):
        rules_of(with_engine(parts[0], vllm_version="0.18.1").engine)


def test_a_server_is_started_with_the_widths_that_its_estimate_has() -> None:
    """A bf16 checkpoint is quantised online, an FP8 cache asked for; both show in memory and in the step law."""
    plain = estimate_profile("Qwen/Qwen3-8B", "h100-80gb", max_model_len=8192)
    cached = estimate_profile("Qwen/Qwen3-8B", "h100-80gb", max_model_len=8192, kv_cache_dtype="fp8")
    small = estimate_profile("Qwen/Qwen3-8B", "h100-80gb", max_model_len=8192, quantization="fp8")
    wide = estimate_profile(
        "Qwen/Qwen3-8B", "h100-80gb", max_model_len=8192, quantization="fp8", kv_cache_dtype="bfloat16"
    )
    assert plain.engine.arguments == {}
    assert cached.engine.arguments == {"kv-cache-dtype": "fp8"}
    assert small.engine.arguments == {"quantization": "fp8"}
    assert "weights" not in small.provenance
    other = estimate_profile("Qwen/Qwen3-8B", "h100-80gb", max_model_len=8192, quantization="awq")
    assert other.provenance["weights"] == "awq, not those of Qwen/Qwen3-8B"
    with pytest.raises(IncompatibleError, match="up to 40,960, the longest context of qwen3-8b"):
        estimate_profile("Qwen/Qwen3-8B", "h100-80gb", max_model_len=40_961)
    with pytest.raises(ValidationError, match=r"up to 0\.33"):
        estimate_profile("Qwen/Qwen3-8B", "h100-80gb", version="0.34.0")
    with pytest.raises(IncompatibleError, match="whose weights are published so, got 'awq'"):
        estimate_profile("Qwen/Qwen3-8B-FP8", "h100-80gb", quantization="awq")
    assert wide.engine.arguments == {"quantization": "fp8", "kv-cache-dtype": "bfloat16"}
    assert cached.model.kv_bytes_per_token == plain.model.kv_bytes_per_token / 2
    assert wide.latency.coefficients["per_kv_token_ms"] == plain.latency.coefficients["per_kv_token_ms"]
    assert small.latency.coefficients["per_kv_token_ms"] == cached.latency.coefficients["per_kv_token_ms"]


def test_tensor_parallel_groups(root: Path) -> None:
    """Two GPUs have twice the memory and the price, read weights in half the time, and pay for all-reduces."""
    model = dimensions(root, LLAMA)
    one, two = (estimate_profile(model, "h100-80gb", max_model_len=8192, tensor_parallel_size=n) for n in (1, 2))
    assert (two.engine.tensor_parallel_size, two.name) == (2, "h100-80gb-x2/llama-3.1-8b-instruct")
    assert two.gpu.price_per_hour == 2 * (one.gpu.price_per_hour or 0.0)
    assert "price" in two.provenance
    assert two.memory.kv_budget_bytes > 2 * one.memory.kv_budget_bytes
    assert one.memory.slot_bytes_per_rank < two.memory.slot_bytes_per_rank < 2 * one.memory.slot_bytes_per_rank
    law, single = two.latency.coefficients, one.latency.coefficients
    assert single["base_ms"] / 2 < law["base_ms"] < single["base_ms"]
    slow = estimate_profile(model, "l40s", max_model_len=8192, tensor_parallel_size=2).latency.coefficients
    alone = estimate_profile(model, "l40s", max_model_len=8192).latency.coefficients
    nvlink, pcie = (
        law["per_prefill_token_ms"] - single["per_prefill_token_ms"] / 2,
        slow["per_prefill_token_ms"] - alone["per_prefill_token_ms"] / 2,
    )
    assert pcie > 5 * nvlink
    for heads, n in ((model, 3), (replace(model, heads=40, kv_heads=10), 4), (replace(model, heads=24), 3)):
        with pytest.raises(IncompatibleError, match=r"divides the \d\d attention heads .*, and divides its \d+ KV"):
            estimate_profile(heads, "h100-80gb", tensor_parallel_size=n)
    assert estimate_profile(replace(model, kv_heads=2), "h100-80gb", tensor_parallel_size=4).engine.gpus == 4


def test_the_band_is_what_the_calibrated_profiles_show(root: Path) -> None:
    """Each calibrated profile, estimated from the other one, has a capacity within the band on 9 of 10 servers."""
    inside, n = 0, 80
    for (model, name), (_, other) in (CALIBRATED, CALIBRATED[::-1]):
        known = load_profile(name)
        engine = known.engine
        estimate = estimate_profile(
            dimensions(root, model),
            "h100-64gb",
            max_model_len=engine.max_model_len,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            version=engine.version,
            reference=other,
        )
        low, high = (estimate.errors[key] for key in BAND_KEYS)
        for i in range(n):
            chosen = scenario(i, known, 3)
            real, said = (chosen.features(each)[COLUMN["capacity"]] for each in (known, estimate))
            inside += bool(low <= real / said <= high)
    assert inside >= 0.9 * 2 * n
