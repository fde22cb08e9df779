"""Step times on a GPU from bytes read and FLOPs computed: a roofline with shares fitted to measurements.

Each layer reads its weights and the KV cache of the decodes, multiplies, and all-reduces over the GPUs of a
tensor-parallel group; sampling, launches and norms add constant times. These times, and the reached shares of the
peaks, were fitted to public measurements of vLLM (`shares.toml`, `benchmarks/accuracy`), separately for dense decoders
and mixtures of experts. The result is a linear law of `packer.terms`, with a bend beyond which arithmetic dominates and
a term for the experts that a batch touches.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np

from packer.arrays import FloatArray
from packer.fit.dimensions import BYTES, EXPERTS_ONLY, QUANTIZATIONS, ModelDimensions
from packer.io.shipped import table
from packer.twin.datasheets import Datasheet

SHARES = table("packer.fit", "shares.toml")
"""Shares of the peaks and times in ms, by "dense" and "experts"; `provenance` says from which measurements."""

GRID = np.unique(np.r_[1:17, 2.0 ** np.arange(4.0, 14.25, 0.25)].round())
"""Tokens of a step at which the law is fitted to the roofline."""

CHUNK = 8192.0  # Tokens of a long prefill.
_SHARP = 3.0  # Exponent of the smooth maximum of reading and multiplying: (read^3 + multiply^3)^(1/3).
_ALIKE = 2.0 ** -np.arange(0.0, 4.0)  # Factors on the experts per token: tokens may choose similar experts.

_ARITHMETIC = {"8": "fp8_flops", "4": "fp4_flops"}


@dataclass(frozen=True)
class Roofline:
    """A model on `ranks` data-parallel ranks of `gpus` GPUs each, of one kind.

    `kv_bytes_each`: bytes of a KV cache element. Tokens and contexts are totals of all ranks. Each rank has an equal
    part of them, and the experts are divided among all GPUs.
    """

    model: ModelDimensions
    sheet: Datasheet
    gpus: int
    kv_bytes_each: float = BYTES
    ranks: int = 1

    @property
    def shares(self) -> dict[str, float]:
        """Shares and times for this kind of model; shares are scaled for a GPU with measurements of kernels only."""
        found: dict[str, float] = SHARES["experts" if self.model.experts else "dense"]
        ratios: dict[str, float] = SHARES["gpus"].get(self.sheet.name, {})
        if not ratios:
            return found
        return {
            name: value * ratios["read" if name.startswith("read") else "multiply"]
            if name.startswith(("read", "multiply", "attend"))
            else value
            for name, value in found.items()
        }

    def _peak(self, bits: str) -> float:
        """Return peak FLOP/s at this width; a GPU without such units converts weights and multiplies in bf16."""
        found = getattr(self.sheet, _ARITHMETIC[bits]) if bits in _ARITHMETIC else None
        return float(found or self.sheet.bf16_flops)

    def _matrix_ms(self, tokens: FloatArray, inputs: float, outputs: float) -> FloatArray:
        """Return the time of one product of (tokens, inputs) by (inputs, outputs), ms."""
        model, shares = self.model, self.shares
        bits = str(QUANTIZATIONS[model.quantization or "bf16"].get("multiply", 16))
        stored = model.weight_bits if model.quantization not in (None, *EXPERTS_ONLY) else 8.0 * BYTES
        name = bits if stored > 4.9 or bits == "4" else "4"
        read = stored / 8.0 * inputs * outputs + BYTES * tokens * (inputs + outputs)
        launch_ms = shares["launch_fp8_ms" if bits == "8" else "launch_ms"]
        read_ms = launch_ms + 1e3 * read / (self.sheet.bandwidth_bytes_s * shares[f"read_{name}"])
        multiply_ms = 2e3 * tokens * inputs * outputs / (self._peak(bits) * shares[f"multiply_{bits}"])
        return larger(read_ms, multiply_ms)

    def _experts_ms(self, tokens: FloatArray) -> FloatArray:
        """Return the time of one layer's experts, ms: read the touched experts, multiply each token with its own.
        Tokens choose similar experts: a batch touches as many experts as `tokens ** routing` independent tokens. The
        times add up because experts with few tokens are bound by reading, experts with many tokens by arithmetic."""
        model, shares = self.model, self.shares
        share = model.experts_per_token / model.experts
        touched = model.experts * (1.0 - (1.0 - share) ** tokens ** shares["routing"])
        kind, bits = self._expert_kernel()
        stored = model.weight_bits if model.quantization else 8.0 * BYTES
        each = model.expert_weights / (self.gpus * self.ranks)
        bandwidth = self.sheet.bandwidth_bytes_s * shares[f"read_{kind}"]
        read_ms = 1e3 * touched * each * stored / 8.0 / bandwidth
        flops = 2e3 * tokens * model.experts_per_token * each
        multiply_ms = flops / (self._peak(bits) * shares[f"multiply_{kind}"])
        return read_ms + multiply_ms + shares["expert_layer_ms"]

    def _expert_kernel(self) -> tuple[str, str]:
        """Name of the experts' kernel in the shares, and the width of its arithmetic."""
        quantization = self.model.quantization
        if quantization in ("fp8", "int8"):
            return "experts_8", "8"
        if quantization in ("nvfp4", "nvfp4-experts") and self.sheet.fp4_flops:
            return "experts_4", "4"
        era = "new" if self.sheet.fp4_flops else "old"
        if quantization == "mxfp4":
            return f"experts_mxfp4_{era}", "16"
        return (f"experts_int4_{era}" if quantization else "experts_16"), "16"

    def tokens_ms(self, tokens: FloatArray, fullest: FloatArray | None = None) -> FloatArray:
        """Return the part of the step time that depends on tokens but not on their contexts, ms.

        `fullest`: tokens of the fullest rank, for which each layer's experts wait; None: all ranks have equal tokens.
        Ranks without requests run a dummy batch that reads the same weights (vllm/v1/engine/core.py, DPEngineCoreProc).
        """
        model, shares, n = self.model, self.shares, self.gpus
        own = tokens / self.ranks if fullest is None else fullest
        total = np.full(len(tokens), shares["step_ms"] + shares["layer_ms"] * model.layers)
        for layers, shapes in self._products():
            for inputs, outputs in shapes:
                total = total + layers * self._matrix_ms(own, inputs, outputs)
        if model.experts:
            total = total + model.expert_layers * self._experts_ms(tokens)
        head = BYTES * model.hidden * model.vocabulary / n
        total = total + 1e3 * head / (self.sheet.bandwidth_bytes_s * shares["read_16"])
        exchanged = model.expert_layers if self.ranks > 1 else 0
        # A layer has two all-reduces; with several ranks, the exchange replaces the one after the experts.
        if n > 1:
            total = total + (2 * model.layers - exchanged) * self._sum_ms(own, n)
        if exchanged:
            total = total + exchanged * self._sum_ms(tokens, n * self.ranks)
        return total

    def _sum_ms(self, tokens: FloatArray, n: int) -> FloatArray:
        """Return the time of an all-reduce among `n` GPUs, or of an all-gather and a reduce-scatter at the experts, ms.
        Source: vllm/distributed/device_communicators/all2all.py, `AgRsAll2AllManager`, the default of vLLM."""
        shares = self.shares
        # A ring all-reduce, or the two exchanges together, sends 2 (n − 1) / n of the data from each GPU.
        sent = 2.0 * BYTES * self.model.hidden * (n - 1) / n / (self.sheet.link_bytes_s * shares["link"])
        latency_ms = shares["reduce_ms"] + shares["reduce_gpu_ms"] * np.log2(n)
        # Slower links are PCIe.
        latency_ms *= 1.0 if self.sheet.link_bytes_s > 1e11 else shares["reduce_pcie"]
        return np.asarray(latency_ms + 1e3 * sent * tokens)

    def prefill_apart_ms(self) -> float:
        """Return a prefill token's time in addition to `tokens_ms`: a prefill is on one rank, not divided among all."""
        chunk = np.array([CHUNK])
        alone = self.tokens_ms(chunk, chunk) if self.ranks > 1 else self.tokens_ms(chunk)
        return float((alone - self.tokens_ms(chunk))[0]) / CHUNK

    def _products(self) -> list[tuple[int, list[tuple[float, float]]]]:
        """Return numbers of layers, each with (inputs, outputs) of its matrices on one GPU, without experts."""
        model, n, hidden = self.model, self.gpus, self.model.hidden
        attention = [(inputs, outputs) for inputs, outputs, _ in model.attention_shapes(n)]
        inner = (model.dense_intermediate if model.experts else model.intermediate) / n
        found = [
            (model.attention_layers, attention),
            (model.state_layers, [(hidden, model.state_in / n), (model.state_out / n, hidden)]),
            (model.layers - model.expert_layers, [(hidden, 2 * inner), (inner, hidden)]),
        ]
        if model.shared_intermediate:
            shared = model.shared_intermediate / n
            found.append((model.expert_layers, [(hidden, 2 * shared), (shared, hidden)]))
        return [(layers, shapes) for layers, shapes in found if layers]

    def context_ms(self) -> tuple[float, float]:
        """Return the time of one token in a decode's context, ms: in layers with full attention, and with a window."""
        model, shares = self.model, self.shares
        kind = "compressed" if model.kv_rank else "16" if self.kv_bytes_each == BYTES else "8"
        if kind == "8" and self.sheet.fp4_flops:
            kind = "8_new"
        # Each GPU of the group reads a compressed cache whole; others are divided by KV heads.
        split = 1 if model.kv_rank else min(self.gpus, model.kv_heads)
        read = self.kv_bytes_each * model.kv_elements / (split * self.ranks)
        each = 1e3 * read / (self.sheet.bandwidth_bytes_s * shares[f"read_kv_{kind}"])
        return each * (model.attention_layers - model.windowed_layers), each * model.windowed_layers

    def attended_ms(self) -> tuple[float, float]:
        """Return the time per token that a prefill token attends to, ms: with full attention, and with a window."""
        model = self.model
        flops = 2.0 * (model.head_dim + (model.value_dim or model.head_dim)) * model.heads / self.gpus
        each = 1e3 * flops / (self.sheet.bf16_flops * self.shares["attend"])
        return each * (model.attention_layers - model.windowed_layers), each * model.windowed_layers


def larger(one: FloatArray, other: FloatArray) -> FloatArray:
    """Return a smooth maximum: the shorter of two overlapping times is hidden except for a part."""
    return (one**_SHARP + other**_SHARP) ** (1.0 / _SHARP)


def law_terms(roofline: Roofline) -> tuple[dict[str, float], float, float]:
    """Return the coefficients of the model's terms in `packer.terms`, `ridge_tokens` and `expert_share`.

    Non-negative least squares of the relative error on `GRID` fit a constant, a slope, a second slope beyond the ridge
    and a term for the share of touched experts to the roofline. In the law, tokens choose experts independently; a
    smaller `expert_share` represents tokens that choose similar experts.
    """
    model, shares = roofline.model, roofline.shares
    wanted = roofline.tokens_ms(GRID)
    share = model.experts_per_token / model.experts if model.experts else 0.0
    shares_of_token = share * _ALIKE if share else np.zeros(1)
    pairs = np.meshgrid(GRID[(GRID >= 16) & (GRID <= 4096)], shares_of_token, indexing="ij")
    ridges, of_token = (each.ravel() for each in pairs)
    bent = np.maximum(0.0, GRID - ridges[:, None])
    touched = 1.0 - (1.0 - of_token[:, None]) ** GRID
    columns = np.stack([np.ones_like(bent), GRID + 0.0 * bent, bent, touched][: 4 if share else 3], axis=-1)
    found, error = non_negative(columns / wanted[:, None], np.ones(len(GRID)))
    best = int(np.argmin(error))
    ridge, share = float(ridges[best]), float(of_token[best])
    base, slope, beyond, experts = (float(each) for each in np.append(found[best], 0.0)[:4])
    whole, windowed = roofline.context_ms()
    attended, attended_windowed = roofline.attended_ms()
    terms = {
        "base_ms": base,
        "per_decode_ms": slope + shares["request_ms"] / roofline.ranks + windowed * model.window,
        "per_prefill_token_ms": slope + attended_windowed * model.window + roofline.prefill_apart_ms(),
        "prefill_step_ms": shares["prefill_step_ms"],
        "per_kv_token_ms": whole,
        "per_token_beyond_ridge_ms": beyond,
        "per_attended_token_ms": attended,
        "experts_ms": experts,
    }
    return terms, ridge, share


def non_negative(designs: FloatArray, wanted: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Non-negative least squares of many designs, float64 (n, rows, columns): coefficients, and sums of squares. Solve
    least squares for every set of columns, and keep the best non-negative solution: exact, fast for few columns."""
    n, _, many = designs.shape
    best, least = np.zeros((n, many)), np.full(n, wanted @ wanted)
    for size in range(1, many + 1):
        for chosen in combinations(range(many), size):
            part = designs[:, :, chosen]
            found = (np.linalg.pinv(part) @ wanted[:, None])[..., 0]
            error = ((np.einsum("nrc,nc->nr", part, found) - wanted) ** 2).sum(axis=1)
            better = (found >= 0.0).all(axis=1) & (error < least)
            best[better] = 0.0
            best[np.ix_(better, chosen)] = found[better]
            least[better] = error[better]
    return best, least
