"""`packer profiles`: descriptions of servers."""

from __future__ import annotations

from typing import Any

import click

import packer
from packer.cli.declare import Readers, argument, bundle, command, option, pairs, values
from packer.cli.options import Output, Writing, common
from packer.cli.output import Table
from packer.cli.settings import NO_LAW
from packer.errors import IncompatibleError
from packer.words import money, number

ERRORS = ("throughput", "itl", "ttft_queued")


@command
def list_(out: Output) -> None:
    """List the measured profiles, and what estimates for each GPU rest on.

    Errors of measured profiles are SMAPE on runs not used for the fit (percent, 0–200). Bands of estimates are of the
    time per output token of a model without measurements of its own, %: the median and the 90th percentile. Anchored:
    servers of that GPU were measured.

    \b
    Example:
      packer profiles list
    """
    from packer.fit.bands import evidence
    from packer.io.profiles import profile_names

    found = [{**summary_of(packer.load_profile(name)), "kind": "measured"} for name in profile_names()]
    out.result(lambda: [*found, *evidence()], lambda: [_table(found), _estimates(evidence())])


def summary_of(profile: packer.Profile) -> dict[str, Any]:
    """Facts of a profile for `--json`."""
    gpu, engine, model = profile.gpu, f"{profile.engine.name} {profile.engine.version}", profile.model.name
    who = {"name": profile.name, "label": profile.label, "calibrated": profile.calibrated}
    who |= {"model": model, "gpu": gpu.name, "price_per_hour": gpu.price_per_hour, "engine": engine}
    return {**who, "errors": dict(profile.errors), "fingerprint": profile.fingerprint}


def _estimates(rows: list[dict[str, Any]]) -> Table:
    def cells(row: dict[str, Any]) -> list[str]:
        pairs = [[row[f"{models}_base_tpot_p{q}"] for q in (50, 90)] for models in ("dense", "experts")]
        bands = [*pairs, [row["dense_adapters_tpot_p90"]]]
        shown = (", ".join(f"{100 * error:.0f}" for error in band) for band in bands)
        return [row["name"], row["kind"], row["dense_from"], *shown]

    lines = list(map(cells, rows))
    columns = ["GPU", "kind", "from", "dense %: p50, p90", "experts", "adapters: p90"]
    return Table("Estimates (packer profiles estimate, packer solve --gpu)", columns, lines, left=(0, 1, 2))


def _table(found: list[dict[str, Any]]) -> Table:
    rows = []
    for row in found:
        errors = (number(row["errors"].get(f"{key}_smape"), 1) for key in ERRORS)
        rows.append([row["label"], row["gpu"], row["engine"], money(row["price_per_hour"]), *errors])
    columns = ["profile", "GPU", "engine", "price/h", "error %: tok/s", "ITL", "TTFT (queued)"]
    return Table(None, columns, rows, left=(0, 1, 2))


RANKS = (8, 16, 32, 64)
SLOTS = (8, 16, 32, 64, 128, 256, 384)


@bundle
class ShowOptions:
    """The profile."""

    profile_name: str = argument("NAME|FILE.toml")


@command
def show(given: ShowOptions, out: Output) -> None:
    """Show one profile.

    \b
    Example:
      packer profiles show h100-64gb/qwen-2.5-7b-instruct
    """
    from packer.cli.memory import capacity
    from packer.io.profiles import profile_to_dict
    from packer.operate.memory import memory_table

    profile = packer.load_profile(given.profile_name)
    data = {**profile_to_dict(profile), "label": profile.label, "fingerprint": profile.fingerprint}
    facts = [*profile.facts(), *[(f"error, {key}", f"{value:g}") for key, value in profile.errors.items()]]
    table = Table(profile.label, ["", ""], facts, left=(0, 1))
    out.result(data, lambda: [table, capacity(memory_table(profile, SLOTS, RANKS))])


SETTINGS: Readers = {
    **dict.fromkeys(("tensor-parallel-size", "data-parallel-size"), click.IntRange(min=1, max=64)),
    "quantization": str,
    **dict.fromkeys(("max-model-len", "max-num-seqs", "max-num-batched-tokens"), click.IntRange(min=1)),
    "gpu-memory-utilization": click.FloatRange(0.0, 1.0, min_open=True),
    "kv-cache-dtype": str,
    "lora-target-modules": lambda text: tuple(filter(None, text.split(","))),
    "vllm-version": str,
    "engine": click.Choice(("vllm", "sglang")),
}


@bundle
class EstimateOptions:
    """The model, the GPU and the server's settings.

    model: A Hugging Face repository known to packer or in this machine's cache, or the model's config.json.
    gpu: h100-80gb, h200, b200, a100-80gb, l40s, l4, rtx4090, mi300x, …, or the data sheet of another.
    name: What the profile is called. [default: GPU/model]
    settings: A setting of the server: tensor-parallel-size (its GPUs, 1), data-parallel-size (1), quantization (fp8,
        int8, awq, gptq, nvfp4), max-model-len, max-num-seqs, max-num-batched-tokens, gpu-memory-utilization,
        kv-cache-dtype (auto, bfloat16, fp8), lora-target-modules (of qkv_proj, o_proj, gate_up_proj, down_proj),
        vllm-version, engine (vllm, sglang). By default as vLLM has it for the model and GPU; --max-model-len 8192 is
        the same; repeatable.
    price_per_hour: Price of the server's GPUs per hour, US dollars. [default: the data sheet's]
    """

    model: str = common("model", required=True)
    gpu: str = common("gpu", required=True)
    name: str | None = option()
    settings: dict[str, Any] = pairs("--set", names=SETTINGS, refused=NO_LAW)
    price_per_hour: float | None = option("--price", type=float)
    output: str = common("output", help="Where to write the profile (.toml).", required=True)


@command
def estimate(given: EstimateOptions, out: Writing) -> None:
    """Estimate a profile from a model's config and a GPU's data sheet, without a measurement.

    Memory follows vLLM's rules, the base model's step law a roofline whose shares were fitted to public
    measurements, the terms of adapters a calibrated H100. The profile carries its errors by what it extrapolates
    from, and is marked "estimated, not calibrated" wherever it is used.

    \b
    Example:
      packer profiles estimate --model meta-llama/Llama-3.1-8B-Instruct --gpu l40s --max-model-len 8192 -o l40s.toml
      packer profiles estimate --model Qwen/Qwen3-32B --gpu h200 --tensor-parallel-size 2 --quantization fp8 -o q.toml
      packer solve fleet.csv --profile l40s.toml
    """
    from packer.io.profiles import write_profile
    from packer.twin.memory.policy import kv_cache_tokens

    output = given.output
    if not output.endswith(".toml"):
        raise IncompatibleError(f"Expected the output's name to end in .toml, got {output[:80]!r}.")
    out.check(output)
    settings = values(given, "model", "gpu", "output", "settings") | given.settings
    named = {"vllm_version": "version", "engine": "engine_name"}
    settings = {named.get(name, name): value for name, value in settings.items()}
    profile = packer.estimate_profile(given.model, given.gpu, **settings)
    write_profile(profile, output, force=out.force)
    tokens = kv_cache_tokens(profile, profile.settings(1, 8))
    said = {"output": output, "kv_cache_tokens_with_one_slot_of_rank_8": tokens}
    out.result(lambda: {**summary_of(profile), **said}, list)
    out.note(f"{output}: {tokens:,} tokens of KV cache with one slot of rank 8")
    if tokens < profile.memory.min_kv_tokens:
        length = profile.engine.max_model_len
        out.note(f"the server would not start with max_model_len {length}: set --max-model-len")
    out.note_profiles(profile)
