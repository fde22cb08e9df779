"""Dimensions of common base models."""

from __future__ import annotations

import pytest

from packer.errors import UnknownNameError
from packer.twin.models import MODELS, model_named

PARAMETERS = {
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


def test_dimensions_give_the_published_parameters() -> None:
    """A wrong layer, head or vocabulary changes the number of parameters, which is published."""
    assert {name: model.weights_bytes / 2 for name, model in MODELS.items()} == PARAMETERS


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "qwen/qwen3-8b", "qwen3-8b", "Qwen3-8B"])
def test_models_are_found_by_name(name: str) -> None:
    """The owner and the case of a repository may be left out."""
    assert model_named(name).repository == "Qwen/Qwen3-8B"


def test_unknown_models_name_the_nearest() -> None:
    """A model that is not in the table is refused with the known ones."""
    with pytest.raises(UnknownNameError, match="Did you mean 'Qwen/Qwen3-8B'"):
        model_named("Qwen/Qwen3-8b-base")
