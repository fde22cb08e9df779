"""The step law of estimates: roofline, its terms, and what they are bound by."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from packer.fit.bands import BANDS, band_errors, evidence, kind_of
from packer.fit.estimate import estimate_profile
from packer.fit.models import MODELS, model_named
from packer.fit.quantization import quantized
from packer.fit.roofline import GRID, SHARES, Roofline, law_terms, non_negative
from packer.terms import LINEAR_TERMS
from packer.twin.datasheets import GPUS, datasheet
from packer.twin.law.linear import linear_features

DENSE, EXPERTS = "Qwen/Qwen3-32B", "openai/gpt-oss-120b"


@pytest.mark.parametrize("name", [DENSE, EXPERTS, "meta-llama/Llama-3.1-70B", "moonshotai/Kimi-K2.5"])
@pytest.mark.parametrize("gpu", ["h100-80gb", "b200", "rtx4090"])
def test_the_law_is_near_the_roofline(name: str, gpu: str) -> None:
    """Constant, slopes and experts are within 12 % of the roofline at every number of tokens, mostly within 4 %."""
    roofline = Roofline(model_named(name), datasheet(gpu), 8)
    terms, ridge, share = law_terms(roofline)
    assert set(terms) <= set(LINEAR_TERMS)
    # tokens of prompts, without what a prompt costs beside its tokens
    features = linear_features(
        decodes=0, prefill_tokens=GRID, adapters=0, sum_ranks=0, slots=0, slot_rank=0, kv_tokens=0, waiting=0,
        graph_max_tokens=512, ridge_tokens=ridge, expert_share=share,
    )  # fmt: skip
    once = {**terms, "prefill_step_ms": 0.0}
    once["per_prefill_token_ms"] -= roofline.attended_ms()[1] * roofline.model.window
    law = features @ np.array([once.get(term, 0.0) for term in LINEAR_TERMS])
    off = np.abs(law / roofline.tokens_ms(GRID) - 1.0)
    assert off.max() < 0.12
    assert np.median(off) < 0.04


@given(seed=st.integers(0, 10**6), columns=st.integers(1, 4))
def test_few_columns_are_solved_exactly(seed: int, columns: int) -> None:
    """Non-negative least squares over sets of columns are those of SciPy's active sets."""
    rng = np.random.default_rng(seed)
    designs, wanted = rng.normal(size=(3, 12, columns)), rng.normal(size=12)
    found, squares = non_negative(designs, wanted)
    for k, design in enumerate(designs):
        known, norm = nnls(design, wanted)
        assert np.allclose(found[k], known, atol=1e-9)
        assert np.isclose(squares[k], norm**2)


def test_a_step_reads_the_weights_and_multiplies_them() -> None:
    """One token takes no less than reading the weights at the peak, many no less than their arithmetic."""
    for name in (DENSE, "meta-llama/Llama-3.1-8B"):
        model, sheet = model_named(name), datasheet("h200")
        one, many = Roofline(model, sheet, 1).tokens_ms(np.array([1.0, 16384.0]))
        linear = model.dense_weights
        assert 1e3 * model.weights_bytes / sheet.bandwidth_bytes_s < one < 2e3 * model.weights_bytes / 4.8e12
        assert 2e3 * 16384 * linear / sheet.bf16_flops < many < 2.5 * 2e3 * 16384 * linear / sheet.bf16_flops


def test_experts_are_read_as_the_batch_touches_them() -> None:
    """One token reads its own experts, a large batch all of them."""
    model = model_named(EXPERTS)
    one, many = Roofline(model, datasheet("h100-80gb"), 2)._experts_ms(np.array([1.0, 256.0]))
    own = SHARES["experts"]["expert_layer_ms"]
    assert (many - own) / (one - own) > 0.8 * model.experts / model.experts_per_token


@pytest.mark.parametrize("name", [EXPERTS, "moonshotai/Kimi-K2.5", "MiniMaxAI/MiniMax-M2.5"])
@pytest.mark.parametrize("ranks", [2, 8])
def test_ranks_share_the_experts_and_nothing_else(name: str, ranks: int) -> None:
    """A rank's step is one GPU's with a rank's tokens, but for experts: those of tensor-parallel GPUs with all tokens,
    gathered before and scattered after each layer. Its KV cache is a rank's, a prefill runs on one rank alone."""
    model, sheet, each = model_named(name), datasheet("b200"), np.array([1.0, 32.0, 1024.0])
    one, group = Roofline(model, sheet, 1), Roofline(model, sheet, ranks)
    spread = Roofline(model, sheet, 1, ranks=ranks)
    experts = group._experts_ms(ranks * each) - one._experts_ms(each) + group._sum_ms(ranks * each, ranks)
    assert spread.tokens_ms(ranks * each) == pytest.approx(one.tokens_ms(each) + model.expert_layers * experts)
    assert np.array(spread.context_ms()) == pytest.approx(np.array(one.context_ms()) / ranks)
    assert spread.attended_ms() == one.attended_ms()
    assert one.prefill_apart_ms() == group.prefill_apart_ms() == 0.0
    alone = spread.tokens_ms(np.array([8192.0]), np.array([8192.0])) - spread.tokens_ms(np.array([8192.0]))
    assert spread.prefill_apart_ms() == pytest.approx(alone[0] / 8192)
    assert alone[0] > 0.0


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("quantization", [None, "fp8", "awq", "nvfp4"])
def test_every_card_and_quantisation_has_a_law(gpu: str, quantization: str | None) -> None:
    """Fewer bits are read faster where the card has no units for them, too; all laws are positive."""
    model = quantized(model_named("Qwen/Qwen3-8B"), quantization)
    found = Roofline(model, datasheet(gpu), 1).tokens_ms(np.array([1.0, 64.0, 4096.0]))
    whole = Roofline(model_named("Qwen/Qwen3-8B"), datasheet(gpu), 1).tokens_ms(np.array([1.0]))
    assert (np.diff(found) > 0).all()
    assert 0.0 < found[0] <= whole[0]


def test_every_model_has_an_estimate() -> None:
    """All shipped models give a profile on GPUs that hold them."""
    for name, model in MODELS.items():
        gpus = next((n for n in (1, 2, 4, 8) if model.weights_bytes < 0.6 * n * GPUS["b300"].memory_bytes), 8)
        if model.heads % gpus == 0 and model.weights_bytes < 0.8 * gpus * GPUS["b300"].memory_bytes:
            length = min(4096, model.max_model_len)
            found = estimate_profile(name, "b300", tensor_parallel_size=gpus, max_model_len=length)
            assert found.latency.coefficients["base_ms"] > 0.0


def test_bands_widen_with_what_is_extrapolated() -> None:
    """Rows of the same server are the nearest, a data sheet alone the farthest; adapters are wider than the base."""
    kinds = [
        kind_of(model_named(name), datasheet(gpu))
        for name, gpu in (
            (DENSE, "h100-80gb"), ("Qwen/Qwen3-8B", "h100-80gb"), (DENSE, "h200"), ("Qwen/Qwen3-8B", "h200"),
            (DENSE, "l40s"), (DENSE, "mi300x"),
        )
    ]  # fmt: skip
    assert kinds == list(BANDS["dense"])
    spread = [kind_of(model_named(EXPERTS), datasheet(gpu), 2) for gpu in ("b200", "mi300x")]
    assert spread == ["data-parallel ranks", "data sheet alone"]
    wide = [band_errors(kind)["base_tpot_p90"] for kind in kinds]
    assert wide[0] == min(wide)
    assert wide[-1] == max(wide)
    for models in ("dense", "experts"):
        for kind in kinds:
            found = band_errors(kind, models)
            assert found["base_tpot_p50"] < found["base_tpot_p90"] < found["adapters_tpot_p90"]
            assert found["capacity_margin_p95"] == pytest.approx(found["adapters_tpot_p90"])


def test_adapters_cost_by_bytes_and_grid() -> None:
    """A faster memory makes the adapters' bytes cheaper, a wider GPU their grid."""
    base = estimate_profile("Qwen/Qwen3-8B", "h100-80gb", max_model_len=8192).latency.coefficients
    fast = estimate_profile("Qwen/Qwen3-8B", "h200", max_model_len=8192).latency.coefficients
    assert fast["per_slot_rank_ms"] == pytest.approx(base["per_slot_rank_ms"] * 3.35 / 4.8, rel=1e-4)
    assert fast["per_slot_block_ms"] == base["per_slot_block_ms"]  # as many SMs at the same clock
    narrow = estimate_profile("Qwen/Qwen3-8B", "l4", max_model_len=4096).latency.coefficients
    assert narrow["per_slot_block_ms"] > 2 * base["per_slot_block_ms"]


def test_no_units_of_that_width_multiply_in_bf16() -> None:
    """FP8 on an A100 is read in FP8 and multiplied in bf16."""
    model = quantized(model_named("Qwen/Qwen3-8B"), "fp8")
    sheet = datasheet("a100-80gb")
    long = np.array([16384.0])
    assert sheet.fp8_flops is None
    slow = Roofline(model, sheet, 1).tokens_ms(long)
    fast = Roofline(model, replace(sheet, fp8_flops=2 * sheet.bf16_flops), 1).tokens_ms(long)
    assert slow[0] > 1.5 * fast[0]


def test_every_card_says_what_its_estimates_rest_on() -> None:
    """Cards with measured servers are anchored, all others estimated, each with its bands."""
    rows = {row["name"]: row for row in evidence()}
    assert set(rows) == set(GPUS)
    anchored = {name for name, row in rows.items() if row["kind"] == "anchored"}
    assert anchored == {"h100-80gb", "h200-141gb", "b200", "b300"}
    assert rows["mi300x"]["dense_from"] == "data sheet alone"
    assert all(0.0 < row["dense_base_tpot_p50"] < row["dense_base_tpot_p90"] < 1.0 for row in rows.values())
