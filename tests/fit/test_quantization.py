"""Weights are stored as the model can have them."""

from __future__ import annotations

import pytest

from packer.errors import IncompatibleError
from packer.fit.models import model_named
from packer.fit.quantization import quantized


@pytest.mark.parametrize("name", ["fp8", "awq", "gptq", "nvfp4", "int8"])
def test_a_quantised_model_is_smaller(name: str) -> None:
    """Each quantisation of a dense model takes fewer bytes than bf16."""
    model = model_named("Qwen/Qwen3-32B")
    assert quantized(model, name).weights_bytes < 0.6 * model.weights_bytes


def test_a_quantisation_of_experts_needs_experts() -> None:
    """MXFP4 is how experts are stored: a mixture shrinks, a dense model is refused rather than left as it is."""
    model = model_named("Qwen/Qwen3-30B-A3B")
    assert quantized(model, "mxfp4").weights_bytes < 0.4 * model.weights_bytes
    with pytest.raises(IncompatibleError, match="stores experts as mxfp4, and qwen3-32b has none"):
        quantized(model_named("Qwen/Qwen3-32B"), "mxfp4")
