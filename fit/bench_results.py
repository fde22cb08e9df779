"""Improve an estimate with measurements on one's own GPU: load generators, a busy server, vLLM's LoRA kernels.

A run of the base model at a steady load determines its mean step time: by Little's law the mean batch is the request
throughput times the decode time of a request. All terms of the base model in the estimated law are multiplied by one
factor, for which a handful of runs is enough. A scrape of /metrics gives the same figures for all steps since the
server started. The adapter terms do not change unless LoRA kernels were measured (`packer.fit.lora_kernels`). Sources:
vllm/benchmarks/serve.py, vllm/benchmarks/sweep/serve.py, vllm/v1/metrics/loggers.py; GuideLLM's GenerativeMetrics
(src/guidellm/benchmark/schemas/metrics.py), whose keys are the same from 0.2 to 0.7.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from packer.errors import FileFormatError, IncompatibleError, ModelError, reading, shown
from packer.fit.lora_kernels import Kernel, Times, read_lora_kernels, with_lora_kernels
from packer.fit.roofline import SHARES
from packer.fit.step_law import with_prompts
from packer.io.files import read_text
from packer.io.shipped import table
from packer.profile import Profile
from packer.terms import LINEAR
from packer.twin.law.law import coefficient_vector
from packer.twin.law.linear import linear_features

Path = str | os.PathLike[str]
FIGURES, UNSTEADY = table("packer.fit", "bench_results.toml").values()
_MOST_OF_BUDGET = 0.5
"""Largest mean step of a run that is used, as a share of `max_num_batched_tokens`. Near this budget, steps with and
without prefills differ too much for their mean to represent them."""


class Steady(NamedTuple):
    """Means of a steady run of the base model: requests decoding, prompt and output tokens of a request, ITL in ms.
    `seen`: requests decoding in the steps of a request, its own included: no step is without any. `context`: tokens
    of a decoding request in the KV cache. `squared`: mean square of the tokens of prompts."""

    batch: float
    prompt: float
    output: float
    itl_ms: float
    seen: float
    context: float
    squared: float

    @property
    def step_tokens(self) -> float:
        """Tokens of a mean step."""
        return self.batch * (1.0 + self.prompt / self.output)


@dataclass(frozen=True, slots=True)
class Measured:
    """Steady runs and times of LoRA kernels, read from files of measurements."""

    runs: tuple[Steady, ...] = ()
    kernels: Times = field(default_factory=dict)


def improved(estimate: Profile, measured: Measured) -> Profile:
    """Return the estimate with all measurements applied."""
    if measured.kernels:
        estimate = with_lora_kernels(estimate, measured.kernels)
    return with_level(estimate, measured.runs) if measured.runs else estimate


def with_level(estimate: Profile, runs: Sequence[Steady]) -> Profile:
    """Multiply the base model's terms of the estimate by measured / estimated step time of these runs.

    The factor is the geometric mean over the runs. A prompt is computed together with the decodes, in one step or in
    as few as take its tokens. Tokens beyond the ridge and attended ones (half a prompt's length each) count by the
    share of steps with a prompt.
    A long output is decoded in more steps, so that the mean context of a step grows with the spread of lengths.

    `estimate`: an uncalibrated profile. `runs`: runs near the token budget of a step are left out.
    Raises `IncompatibleError`: the profile is calibrated, or its law is not the linear one; `ModelError`: all runs
    are near the token budget.
    """
    law = estimate.latency
    if estimate.calibrated or law.form != "linear":
        rule = f"Expected an estimate of `packer profiles estimate` to improve, got {estimate.label!r}."
        raise IncompatibleError(rule)
    budget = _MOST_OF_BUDGET * estimate.engine.server_tokens
    light = [run for run in runs if run.step_tokens <= budget]
    if not light:
        raise ModelError(
            f"Expected a run with at most {budget:,.0f} tokens in a mean step (half of max_num_batched_tokens), got "
            f"{len(runs)} with {min(run.step_tokens for run in runs):,.0f} and more: measure at lower rates."
        )
    batch, prompt, output, itl_ms, seen, context, squared = np.array(light).T
    starts = batch / output
    features = linear_features(
        decodes=seen, prefill_tokens=starts * prompt, kv_tokens=seen * context,
        graph_max_tokens=law.graph_max_tokens, attended=starts * squared / 2.0, expert_share=law.expert_share,
    )  # fmt: skip
    with_prompts(features, law, seen, starts, prompt, estimate.engine.server_tokens)
    factor = float(np.exp(-np.mean(np.log(features @ coefficient_vector(law) / itl_ms))))
    adapters = {term.name for term in LINEAR if term.part == "lora"}
    scaled = {term: float(f"{value * factor:.6g}") for term, value in law.coefficients.items()}
    coefficients = scaled | {term: value for term, value in law.coefficients.items() if term in adapters}
    after = ((key, value) for key, value in SHARES["after_runs"].items() if key != "provenance")
    bands = {key: min(value, estimate.errors.get(key, value)) for key, value in after}
    note = f"steps of the base model times {factor:.4g}, from {len(light)} of {len(runs)} runs of it"
    band = estimate.errors.get("base_tpot_p90", 1.0)
    if not 1.0 - band <= factor <= 1.0 / (1.0 - min(band, 0.99)):
        note += f", beyond the {100 * band:.0f} % of the estimate: was it this model on this GPU?"
    errors, notes = {**estimate.errors, **bands}, {**estimate.provenance, "improved": note}
    return replace(estimate, latency=replace(law, coefficients=coefficients), errors=errors, provenance=notes)


def read_bench_results(paths: Sequence[Path]) -> Measured:
    """Read results of vLLM's benchmarks or GuideLLM, or pages of /metrics; raises `FileFormatError`."""
    found: list[Steady] = []
    kernels: dict[Kernel, dict[int, float]] = {}
    for path in paths:
        with reading(path):
            text = read_text(path)
            if "LORA_SHRINK(" in text or "LORA_EXPAND(" in text:  # a table of vLLM's LoRA kernels
                for kernel, each in read_lora_kernels(text).items():
                    kernels.setdefault(kernel, {}).update(each)
                continue
            runs = [_scraped(text)] if re.search("^vllm:", text, re.MULTILINE) else _runs(text)
            found += [_steady(values, k) for k, values in enumerate(runs, 1)]
    return Measured(tuple(found), kernels)


def _scraped(text: str) -> dict[str, float]:
    """Return the means of all steps since the server started, and the request rate that gives their mean batch."""
    totals: dict[str, float] = {}
    for name, labels, value in re.findall(r"^vllm:(\w+)(\{.*\})? +([-+.\w]+)", text, re.MULTILINE):
        if re.search('(running|waiting)_lora_adapters="[^"]', labels):
            raise FileFormatError("expected the base model's steps alone, got adapters in vllm:lora_requests_info.")
        with suppress(ValueError):
            totals[name] = totals.get(name, 0.0) + float(value)

    def mean(*names: str) -> float:
        sums = next((name for name in names if totals.get(f"{name}_count")), names[0])
        return totals.get(f"{sums}_sum", math.nan) / (totals.get(f"{sums}_count") or math.nan)

    output, itl_s = mean("request_generation_tokens"), mean(*_GAPS)
    steps = totals.get("iteration_tokens_total_count") or math.nan
    # the first token of a request comes from its prefill
    later = totals.get("generation_tokens_total", math.nan) * (1.0 - 1.0 / output) if output else math.nan
    stay_s = (output - 1.0) * itl_s
    rate, prompt = later / steps / stay_s if stay_s else math.nan, mean("request_prompt_tokens")
    return {"rate": rate, "prompt": prompt, "output": output, "itl_ms": 1e3 * itl_s}


def _runs(text: str) -> Iterator[dict[str, float]]:
    """Yield for each run: requests per second, mean prompt and output tokens of a request, and mean ITL in ms."""
    for document in documents(text):
        if isinstance(document, dict) and isinstance(runs := document.get("benchmarks"), list) and runs:
            for each in runs:
                found = {
                    key: _number(_at(each, "metrics", row["guidellm"], "successful", "mean"))
                    for key, row in FIGURES.items()
                }
                # Requests at a constant rate find no more than the mean batch with themselves.
                at_random = any(_at(each, key, "strategy", "type_") == "poisson" for key in ("config", "args"))
                spread = (
                    _number(_at(each, "metrics", FIGURES[key]["guidellm"], "successful", "variance"))
                    for key in ("prompt", "output")
                )
                yield found | _of_spread(found, *spread) | ({"most": math.inf} if at_random else {})
        elif isinstance(document, dict) and "request_throughput" in document:
            for key, what in UNSTEADY.items():
                if document.get(key) is not None:
                    raise FileFormatError(f"expected a steady run of the base model, got {what} ({key}).")
            completed = _number(document.get("completed"))
            yield {
                "rate": _number(document["request_throughput"]),
                "prompt": _number(document.get("total_input_tokens")) / completed if completed else math.nan,
                "output": _number(document.get("total_output_tokens")) / completed if completed else math.nan,
                # figures that --percentile-metrics does not name are not written
                "itl_ms": _number(document.get("mean_tpot_ms", document.get("mean_itl_ms"))),
                "most": math.inf if (most := document.get("max_concurrency")) is None else _number(most),
                **_of_lengths(document.get("input_lens"), document.get("output_lens")),
            }
        else:
            raise FileFormatError(f"{_EXPECTED}, got {shown(document)}.")


def documents(text: str) -> list[Any]:
    """Return a text's JSON documents: one, a list (`vllm bench sweep serve`), or one per line (`--append-result`)."""
    try:
        found = json.loads(text)
        return found if isinstance(found, list) and found else [found]
    except (ValueError, RecursionError):
        pass
    found = []
    for k, line in enumerate(text.splitlines(), 1):
        try:
            found += [json.loads(line)] if line.strip() else []
        except (ValueError, RecursionError) as error:
            raise FileFormatError(f"{_EXPECTED}, got no JSON: {error}.", row=k) from None
    return found


def _at(document: Any, *keys: str) -> Any:
    """The value under these keys of nested objects; None if one is absent."""
    for key in keys:
        document = document.get(key) if isinstance(document, dict) else None
    return document


def _number(value: Any) -> float:
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if known and abs(value) < 1e300 else math.nan


def _of_spread(means: dict[str, float], prompt_var: float, output_var: float) -> dict[str, float]:
    """`context` and `squared` by the variances of lengths, which do not depend on each other; {} if not known."""
    prompt, output = means["prompt"], means["output"] or math.nan
    found = {"context": prompt + (output + output_var / output) / 2.0, "squared": prompt * prompt + prompt_var}
    return found if all(0.0 < each < 1e24 for each in found.values()) else {}


def _of_lengths(inputs: Any, outputs: Any) -> dict[str, float]:
    """`context` and `squared` by the lengths of the answered requests, which `--save-detailed` records; {} without."""
    if not (isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs)):
        return {}
    lengths = np.array([[*map(_number, inputs)], [*map(_number, outputs)]])
    prompt, output = answered = lengths[:, lengths[1] != 0.0]
    if not (len(output) and np.all((answered > 0.0) & (answered < 1e12))):
        return {}
    return {"context": float(output @ (prompt + output / 2.0) / output.sum()), "squared": float(np.mean(prompt**2))}


def _steady(values: dict[str, float], run: int) -> Steady:
    most = values.pop("most", 0.0)  # open requests; infinite: no limit, 0: not known
    missing = [name for name in FIGURES if not 0.0 < values[name] < 1e12]
    if missing or values["output"] < 2.0:
        what = ", ".join(FIGURES[name]["words"] for name in missing) or "answers of two tokens or more"
        raise FileFormatError(f"run {run}: expected positive figures, got none for {what}.")
    rate, prompt, output, itl_ms = (values[name] for name in FIGURES)
    context, squared = values.get("context", prompt + output / 2.0), values.get("squared", prompt**2)
    batch = rate * (output - 1.0) * itl_ms * 1e-3
    # A request that comes at a random time finds the mean batch, and adds itself.
    return Steady(batch, prompt, output, itl_ms, max(1.0, batch, min(batch + 1.0, most)), context, squared)


_EXPECTED = (
    "expected a result of vllm bench serve (request_throughput) or GuideLLM (benchmarks), a page of /metrics or "
    "what benchmark_lora.py printed"
)
_GAPS = ("inter_token_latency_seconds", "time_per_output_token_seconds")
"""Histograms of the time between tokens, the newest name first."""
