"""Weights are stored as the model can have them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from packer.errors import IncompatibleError
from packer.fit.models import model_named
from packer.fit.quantization import WEIGHT_BITS, of_experts, quantized, weights_of_config
from packer.fit.roofline import Roofline
from packer.twin.datasheets import datasheet


@pytest.mark.parametrize("name", ["fp8", "awq", "gptq", "nvfp4", "int8"])
def test_a_quantised_model_is_smaller(name: str) -> None:
    """Each quantisation of a dense model takes fewer bytes than bf16."""
    model = model_named("Qwen/Qwen3-32B")
    assert quantized(model, name).weights_bytes < 0.6 * model.weights_bytes


@pytest.mark.parametrize("name", ["awq", "gptq"])
def test_a_config_takes_as_many_bits_as_the_name(name: str) -> None:
    """A weight has its share of the scale, with AWQ also of the zero point, whether a config or a name says so."""
    given = {"quant_method": name, "bits": 4, "group_size": 128}
    assert weights_of_config(given, "config.json") == (WEIGHT_BITS[name], name)


def test_a_quantisation_of_experts_needs_experts() -> None:
    """MXFP4 is how experts are stored: a mixture shrinks, a dense model is refused rather than left as it is."""
    model = model_named("Qwen/Qwen3-30B-A3B")
    assert quantized(model, "mxfp4").weights_bytes < 0.4 * model.weights_bytes
    with pytest.raises(IncompatibleError, match="stores experts as mxfp4, and qwen3-32b has none"):
        quantized(model_named("Qwen/Qwen3-32B"), "mxfp4")


def test_what_is_made_of_int4_experts_leaves_the_rest_in_bf16() -> None:
    """Kimi K2.5 in NVFP4 takes what it takes with its own 4.5 bits: attention is stored and read in bf16."""
    model, one = model_named("moonshotai/Kimi-K2.5"), np.ones(1)
    found = quantized(model, "nvfp4")
    assert found.weights_bytes == model.weights_bytes
    ours, plain = (Roofline(each, datasheet("b200"), 4) for each in (found, replace(model, quantization=None)))
    assert ours._matrix_ms(one, 7168, 7168) == plain._matrix_ms(one, 7168, 7168)
    assert ours._expert_kernel() == ("experts_4", "4")


def test_configs_say_that_experts_alone_are_quantised() -> None:
    """Where attention is among the modules left out, only experts are quantised, in groups of the size that is said."""
    groups = {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}}
    stored = {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head", "re:.*self_attn.*"]}
    assert weights_of_config(stored, "config.json") == (4.5, "gptq")
    assert of_experts(stored, "gptq") == "int4-experts"
    assert of_experts({**stored, "ignore": ["lm_head"]}, "gptq") == "gptq"
    assert of_experts({"exclude_modules": ["*self_attn*"]}, "nvfp4") == "nvfp4-experts"
    assert of_experts({"exclude_modules": ["*self_attn*"]}, "fp8") == "fp8"
