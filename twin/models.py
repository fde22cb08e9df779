"""Dimensions of common base models, from the config.json of their Hugging Face repositories."""

from __future__ import annotations

from packer.errors import UnknownNameError
from packer.twin.model_config import ModelDimensions


def _model(repository: str, kind: str, *sizes: int, tied: bool = False) -> ModelDimensions:
    name = repository.rpartition("/")[2].lower()
    layers, hidden, intermediate, heads, kv_heads, head_dim, vocabulary, max_model_len = sizes
    return ModelDimensions(
        *(name, kind, layers, hidden, intermediate, heads, kv_heads, head_dim, vocabulary),
        tied=tied,
        max_model_len=max_model_len,
        repository=repository,
    )


MODELS = {
    model.repository: model
    for model in (
        _model("meta-llama/Llama-3.1-8B-Instruct", "llama", 32, 4096, 14336, 32, 8, 128, 128_256, 131_072),
        _model("meta-llama/Llama-3.1-70B-Instruct", "llama", 80, 8192, 28672, 64, 8, 128, 128_256, 131_072),
        _model(
            *("meta-llama/Llama-3.2-1B-Instruct", "llama"),
            *(16, 2048, 8192, 32, 8, 64, 128_256, 131_072),
            tied=True,
        ),
        _model(
            *("meta-llama/Llama-3.2-3B-Instruct", "llama"),
            *(28, 3072, 8192, 24, 8, 128, 128_256, 131_072),
            tied=True,
        ),
        _model("meta-llama/Llama-3.3-70B-Instruct", "llama", 80, 8192, 28672, 64, 8, 128, 128_256, 131_072),
        _model("mistralai/Mistral-7B-Instruct-v0.3", "mistral", 32, 4096, 14336, 32, 8, 128, 32_768, 32_768),
        _model(
            *("Qwen/Qwen2.5-3B-Instruct", "qwen2"), *(36, 2048, 11008, 16, 2, 128, 151_936, 32_768), tied=True
        ),
        _model("Qwen/Qwen2.5-7B-Instruct", "qwen2", 28, 3584, 18944, 28, 4, 128, 152_064, 32_768),
        _model("Qwen/Qwen2.5-14B-Instruct", "qwen2", 48, 5120, 13824, 40, 8, 128, 152_064, 32_768),
        _model("Qwen/Qwen3-4B", "qwen3", 36, 2560, 9728, 32, 8, 128, 151_936, 40_960, tied=True),
        _model("Qwen/Qwen3-8B", "qwen3", 36, 4096, 12288, 32, 8, 128, 151_936, 40_960),
    )
    if model.repository is not None
}


def model_named(name: str) -> ModelDimensions:
    """The model of that repository, with or without its owner, whatever the case; raises `UnknownNameError`."""
    wanted = name.lower().rstrip("/")
    for repository, model in MODELS.items():
        if wanted in (repository.lower(), model.name):
            return model
    raise UnknownNameError("model", name, MODELS)
