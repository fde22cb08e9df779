"""Public measurements of vLLM servers: closed loops of base models, by server."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import packer
from packer.arrays import FloatArray
from packer.fit.dimensions import ModelDimensions
from packer.fit.models import model_named
from packer.fit.quantization import quantized
from packer.fit.roofline import CHUNK, Roofline
from packer.twin.datasheets import Datasheet, datasheet

LIBRARY = Path(__file__).resolve().parents[3] / "shared" / "data" / "public"
"""Where the measurements lie: they are not part of the package (see README.md of this folder)."""

DATA_PARALLEL = "config_id=707;"
"""The one configuration whose attention was data-parallel: MiniMax-M2.5 on B200, `--tensor-parallel-size=1
--data-parallel-size=2 --enable-expert-parallel`. The column `attention_dp_size` is above 1 in 79 rows. In the recipes
that measured the others (SemiAnalysisAI/InferenceX, .github/configs/nvidia-master.yaml and benchmarks/single_node on
the days on which they were measured) attention is tensor-parallel, with `--enable-expert-parallel` or, for Kimi K2.5,
without; their `batch_size` is the concurrency divided by a number of ranks that there was not."""

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
    ranks: int
    precision: str
    experts_split: bool
    fp8_cache: bool
    prompt: FloatArray
    output: FloatArray
    concurrency: FloatArray
    tpot_ms: FloatArray

    @property
    def name(self) -> str:
        """Model, GPU, precision and GPUs."""
        cache = ", FP8 cache" if self.fp8_cache and self.model.experts else ""
        return f"{self.model.name} {self.precision}, {self.sheet.name} {self.groups}{cache}"

    @property
    def groups(self) -> str:
        """Tensor-parallel GPUs, data-parallel ranks, and whether experts are whole on a GPU: "4, EP"."""
        return f"{self.gpus}{f' x DP {self.ranks}' if self.ranks > 1 else ''}{', EP' if self.experts_split else ''}"

    def roofline(self) -> Roofline:
        """What the law of its estimate comes from."""
        return Roofline(self.model, self.sheet, self.gpus, 1.0 if self.fp8_cache else 2.0, self.ranks)


def servers(library: Path = LIBRARY) -> list[Server]:
    """All servers of `silicon_vllm.csv` but those of one row, and doubtful ones."""
    found: dict[tuple[str, ...], list[dict[str, str]]] = {}
    with (library / "silicon_vllm.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if "Llama-3.1-8B" in row["model_path"] or float(row["silicon_ttft_ms"]) >= SATURATED_MS:
                continue
            split = "ep" if float(row["moe_ep_size"] or 1) > 1 else ""
            split = "dp" if DATA_PARALLEL in row["silicon_data_source"] else split
            if float(row["attention_dp_size"] or 1) > 1:
                row["batch_size"] = row["silicon_data_source"].split("silicon_concurrency=")[1].split(";")[0]
            first = (row["model_path"], row["system"], row["precision"] or "bf16", row["tp_size"])
            found.setdefault((*first, split, "fp8" if _fp8_cache(row) else ""), []).append(row)
    return [_server(key, rows) for key, rows in sorted(found.items()) if len(rows) > 1]


def _fp8_cache(row: dict[str, str]) -> bool:
    """Whether the server kept its KV cache in FP8: by its flags in InferenceX's recipes, or by its checkpoint.

    NVIDIA's NVFP4 checkpoints of Kimi say so themselves; the flag came to MiniMax-M2.5 on B200 with vLLM 0.19
    (3 April 2026) and to gpt-oss on B200 with 0.11.2 (5 December 2025). Llama 3.1 had it from the beginning.
    """
    model, version = row["model_path"], row["backend_version"]
    blackwell = row["system"] == "b200_sxm"
    if "Llama" in model:
        return True
    if "gpt-oss" in model:
        return blackwell and bool(version)
    return (
        blackwell and version >= "0.19" and "nightly" not in version
        if "MiniMax" in model
        else row["precision"] == "fp4"
    )


def _server(key: tuple[str, ...], rows: list[dict[str, str]]) -> Server:
    name, system, precision, gpus, split, cache = key
    model = model_named(name)
    if precision == "fp8":
        model = quantized(model, "fp8")
    elif precision == "fp4":
        model = quantized(model, "nvfp4")
    columns = ("isl", "osl", "batch_size", "silicon_tpot_ms")
    table = np.array([[float(row[column]) for column in columns] for row in rows]).T
    ranks = int(gpus) if split == "dp" else 1
    sheet = datasheet(GPU[system])
    return Server(model, sheet, int(gpus) // ranks, ranks, precision, bool(split), cache == "fp8", *table)


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
    decode = (
        step
        + shares["request_ms"] * c / roofline.ranks
        + c * (whole * context + windowed * np.minimum(context, window))
    )
    tokens = ((roofline.tokens_ms(c + CHUNK) - step) / CHUNK + roofline.prefill_apart_ms()) * prompt
    prefill = tokens + attended * prompt**2 / 2.0 + attended_windowed * prompt * window
    stall = np.maximum(0.0, c - 1.0) * prefill / output
    return decode + stall + np.minimum(1.0, c / output) * shares["prefill_step_ms"]
