"""Dimensions of common base models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from packer.errors import IncompatibleError, UnknownNameError
from packer.fit.model_config import read_model_config
from packer.fit.models import MODELS, cached_config, model_named

PARAMETERS = {
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.1-70B-Instruct": 70_553_706_496,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "meta-llama/Llama-3.2-3B-Instruct": 3_212_749_824,
    "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496,
    "mistralai/Mistral-7B-Instruct-v0.3": 7_248_023_552,
    "Qwen/Qwen2.5-3B-Instruct": 3_085_938_688,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-14B-Instruct": 14_770_033_664,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
}
"""Published numbers of parameters (safetensors metadata of the repositories)."""

BILLIONS = {
    "meta-llama/Llama-3.1-405B-Instruct": (405.9, 405.9),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": (107.8, 17.2),
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct": (400.7, 17.2),
    "mistralai/Mixtral-8x22B-Instruct-v0.1": (140.6, 39.2),
    "Qwen/Qwen2.5-72B-Instruct": (72.7, 72.7),
    "Qwen/Qwen3-32B": (32.8, 32.8),
    "Qwen/Qwen3-235B-A22B": (235.1, 22.1),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (79.67, 3.82),
    "google/gemma-3-27b-it": (27.0, 27.0),
    "microsoft/phi-4": (14.66, 14.66),
    "deepseek-ai/DeepSeek-V3": (671.0, 37.5),
    "zai-org/GLM-4.5-Air": (106.9, 13.4),
    "ibm-granite/granite-3.3-8b-instruct": (8.17, 8.17),
    "MiniMaxAI/MiniMax-M2.5": (228.7, 11.0),
    "moonshotai/Kimi-K2.5": (1026.4, 32.7),
}
"""Parameters of the language model, in all and for one token, in billions, as the makers round them."""


def test_dimensions_give_the_published_parameters() -> None:
    """A wrong layer, head or vocabulary changes the number of parameters, which is published."""
    found = {name: model.weights_bytes / 2 for name, model in MODELS.items() if name in PARAMETERS}
    assert found == PARAMETERS


@pytest.mark.parametrize("name", BILLIONS)
def test_mixtures_have_the_published_sizes(name: str) -> None:
    """Experts, shared experts, dense layers and compressed keys add up to the size in the model's card."""
    model, (total, active) = MODELS[name], BILLIONS[name]
    dense = model.dense_weights + model.others
    everything = dense + model.expert_layers * model.experts * model.expert_weights
    assert everything / 1e9 == pytest.approx(total, rel=0.002)
    assert model.active_bytes / 2e9 == pytest.approx(active, rel=0.005)


def test_forty_models_of_all_families() -> None:
    """At least 40 models are known, of each family that people serve."""
    assert len(MODELS) >= 40
    families = {
        "Llama-2", "Llama-3", "Llama-4", "Qwen2.5", "Qwen3", "Qwen3.5", "Mistral", "Mixtral", "gemma-2", "gemma-3",
        "Phi-", "gpt-oss", "DeepSeek", "GLM", "granite", "MiniMax",
    }  # fmt: skip
    assert {family for family in families if any(family in name for name in MODELS)} == families


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen3-8B", "qwen/qwen3-8b", "qwen3-8b", "Qwen3-8B", "mine/Qwen3-8B", "qwen3 8b"]
)
def test_models_are_found_by_name(name: str) -> None:
    """The owner, the case and the separators of a repository may be left out or be others."""
    assert model_named(name).repository == "Qwen/Qwen3-8B"


def test_models_like_others_have_their_dimensions() -> None:
    """A row with `like` is the other model but for what it says; the older name of Llama 3.1 is the same model."""
    old, new = (model_named("meta-llama/Meta-Llama-3.1-8B-Instruct"), MODELS["meta-llama/Llama-3.1-8B-Instruct"])
    assert old is new
    short, long = MODELS["Qwen/Qwen3-4B"], model_named("Qwen/Qwen3-4B-Instruct-2507")
    assert (long.weights_bytes, long.max_model_len) == (short.weights_bytes, 262_144)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("openai-community/gpt2", "without LoRA"), ("deepseek-ai/DeepSeek-V3.2", "sparse attention"),
     ("google/flan-t5-xl", "encoder-decoders"), ("state-spaces/mamba-2.8b-hf", "without LoRA")],
)  # fmt: skip
def test_kinds_that_are_not_supported_are_refused_by_name(name: str, reason: str) -> None:
    """A name of a kind that cannot be estimated says why, without its config."""
    with pytest.raises(IncompatibleError, match=f"cannot be estimated: .*{reason}"):
        model_named(name)


def test_unknown_models_name_the_nearest() -> None:
    """A model that is not in the table is refused with the known ones, and with what else may be given."""
    with pytest.raises(UnknownNameError, match=r"Did you mean 'Qwen/Qwen3-8B'\? Any other: give .* config.json"):
        model_named("Qwen/Qwen3-8C")


@pytest.mark.parametrize(
    ("name", "quantization", "bits"),
    [
        ("nvidia/Llama-3.1-70B-Instruct-FP8", "fp8", 8.0),
        ("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", "fp8", 8.0),
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", "awq", 4.15625),
        ("nvidia/Llama-3.3-70B-Instruct-NVFP4", "nvfp4", 4.5),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8", "int8", 8.0),
        ("RedHatAI/Qwen2.5-7B-Instruct-quantized.w8a8", "int8", 8.0),
        ("hugging-quants/Meta-Llama-3.1-70B-Instruct-AWQ-INT4", "awq", 4.15625),
    ],
)
def test_repositories_of_quantised_weights(name: str, quantization: str, bits: float) -> None:
    """A suffix that names a quantisation gives the model before it with such weights."""
    found = model_named(name)
    assert (found.quantization, found.weight_bits, found.repository) == (quantization, bits, name)


def test_models_of_hugging_faces_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository that packer does not know is read from the cache on this machine, its main branch first."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    folder = tmp_path / "hub" / "models--acme--toy-7b"
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 1000, "max_position_embeddings": 512,
    }  # fmt: skip
    for commit, layers in (("aaa", 2), ("bbb", 3)):
        (folder / "snapshots" / commit).mkdir(parents=True)
        text = json.dumps(config | {"num_hidden_layers": layers})
        (folder / "snapshots" / commit / "config.json").write_text(text)
    assert model_named("acme/toy-7b").layers == 2
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("bbb\n")
    assert model_named("acme/toy-7b").layers == 3
    assert model_named("acme/toy-7b").repository == "acme/toy-7b"
    assert cached_config("acme/other") is None


@pytest.mark.parametrize(
    ("kind", "rope", "tokens"),
    [
        ("llama", {"type": "linear", "factor": 4.0}, 65_536),
        ("llama", {"rope_type": "dynamic", "factor": 2}, 32_768),
        ("llama", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16_384}, 65_536),
        ("llama", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4_096}, 16_384),
        ("llama", {"rope_type": "llama3", "factor": 8.0}, 16_384),
        ("llama", None, 16_384),
        ("gemma3_text", {"rope_type": "linear", "factor": 8.0}, 16_384),
    ],
)
def test_the_longest_context_is_scaled_as_in_vllm(
    kind: str, rope: object, tokens: int, root: Path, tmp_path: Path
) -> None:
    """DeepSeek Coder's 16,384 positions times its factor of 4 are the context that vLLM takes by default."""
    data = json.loads((root / "tests/data/models/llama-3.1-8b.json").read_text())
    data |= {"model_type": kind, "max_position_embeddings": 16_384, "rope_scaling": rope}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(data))
    assert read_model_config(path).max_model_len == tokens
