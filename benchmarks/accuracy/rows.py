"""Public measurements of vLLM servers: closed loops of base models, by server."""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

import packer
from packer.arrays import FloatArray
from packer.fit.dimensions import ModelDimensions
from packer.fit.models import model_named
from packer.fit.quantization import WEIGHT_BITS, quantized
from packer.fit.roofline import Roofline
from packer.twin.datasheets import Datasheet, datasheet

LIBRARY = Path(__file__).resolve().parents[3] / "shared" / "data" / "public"
"""Where the measurements lie: they are not part of the package (see README.md of this folder)."""

GPU = {"h100_sxm": "h100-80gb", "h200_sxm": "h200-141gb", "b200_sxm": "b200", "b300_sxm": "b300"}
SATURATED_MS = 3000.0
"""Rows with a longer TTFT wait for KV blocks: they measure the queue."""
SHORTEST = 0.8
"""The client draws each length evenly from this share of the nominal one up to it (InferenceMAX, README.md:
`RANDOM_RANGE_RATIO` 0.8 for `vllm bench serve`): requests that start together do not stay together."""


@dataclass(frozen=True)
class Server:
    """One server's rows; arrays float64 (rows,)."""

    model: ModelDimensions
    sheet: Datasheet
    gpus: int
    precision: str
    experts_split: bool
    prompt: FloatArray
    output: FloatArray
    concurrency: FloatArray
    tpot_ms: FloatArray

    @property
    def name(self) -> str:
        """Model, GPU, precision and GPUs."""
        split = " EP" if self.experts_split else ""
        return f"{self.model.name} {self.precision}, {self.sheet.name} x{self.gpus}{split}"

    def roofline(self) -> Roofline:
        """What the law of its estimate comes from."""
        return Roofline(self.model, self.sheet, self.gpus, kv_bytes_each(self.model))


def kv_bytes_each(model: ModelDimensions) -> float:
    """Bytes of a number in the KV cache of the servers measured: FP8 with dense FP8 and FP4 checkpoints."""
    return 1.0 if model.quantization in ("fp8", "nvfp4") and not model.experts else 2.0


def servers(library: Path = LIBRARY) -> list[Server]:
    """All servers of `silicon_vllm.csv` but those of one row, of several data-parallel ranks, and doubtful ones."""
    found: dict[tuple[str, ...], list[dict[str, str]]] = {}
    with (library / "silicon_vllm.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            doubtful = "Llama-3.1-8B" in row["model_path"] or float(row["silicon_ttft_ms"]) >= SATURATED_MS
            if doubtful or float(row["attention_dp_size"] or 1) > 1:
                continue
            split = "ep" if float(row["moe_ep_size"] or 1) > 1 else ""
            key = (row["model_path"], row["system"], row["precision"] or "bf16", row["tp_size"], split)
            found.setdefault(key, []).append(row)
    return [_server(key, rows) for key, rows in sorted(found.items()) if len(rows) > 1]


def _server(key: tuple[str, ...], rows: list[dict[str, str]]) -> Server:
    name, system, precision, gpus, split = key
    model = model_named(name)
    if precision == "fp8":
        model = quantized(model, "fp8")
    elif precision == "fp4" and model.quantization != "mxfp4":
        model = replace(model, quantization="nvfp4", weight_bits=WEIGHT_BITS["nvfp4"])
    columns = ("isl", "osl", "batch_size", "silicon_tpot_ms")
    table = np.array([[float(row[column]) for column in columns] for row in rows]).T
    return Server(model, datasheet(GPU[system]), int(gpus), precision, bool(split), *table)


def drawn(nominal: int) -> packer.Lengths:
    """Lengths as the client draws them."""
    return packer.Lengths.empirical(np.linspace(SHORTEST * nominal, nominal, 64).round())


def proxy_tpot_ms(server: Server) -> FloatArray:
    """TPOT of each row without a simulation: a decode step, and its share of the other requests' prefills.

    step(c, prompt + output / 2) + (c - 1) * prefill(prompt) / output; a long prefill's cost of a token is taken.
    """
    roofline, c = server.roofline(), server.concurrency
    prompt, output = (each * (1.0 + SHORTEST) / 2.0 for each in (server.prompt, server.output))
    context = prompt + output / 2.0
    whole, windowed = roofline.context_ms()
    attended, attended_windowed = roofline.attended_ms()
    window, shares = server.model.window, roofline.shares
    step = roofline.tokens_ms(c)
    decode = step + shares["request_ms"] * c + c * (whole * context + windowed * np.minimum(context, window))
    chunk = 8192.0
    tokens = (roofline.tokens_ms(c + chunk) - step) / chunk * prompt
    prefill = tokens + attended * prompt**2 / 2.0 + attended_windowed * prompt * window
    stall = np.maximum(0.0, c - 1.0) * prefill / output
    return decode + stall + np.minimum(1.0, c / output) * shares["prefill_step_ms"]
