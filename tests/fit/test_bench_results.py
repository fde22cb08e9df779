"""Results of load generators: read as measurements, and an estimate comes nearer to the server that gave them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import packer
from packer.errors import FileFormatError, IncompatibleError, ModelError
from packer.fit.bands import bands_in_words
from packer.fit.bench_results import Measured, improved, read_bench_results
from packer.fit.estimate import estimate_profile
from packer.fit.model_config import read_model_config
from packer.io.profiles import load_profile
from packer.profile import Profile
from packer.solvers.backbone import without_adapters

LLAMA, QWEN = "h100-64gb/llama-3.1-8b-instruct", "h100-64gb/qwen-2.5-7b-instruct"


def vllm_result(rate: float, output: int, tpot_ms: float, prompt: int = 500, n: int = 100) -> dict[str, Any]:
    """What `vllm bench serve --save-result` writes, without options for its figures (vllm/benchmarks/serve.py)."""
    figures = {"ttft": 80.0, "tpot": tpot_ms, "itl": 2 * tpot_ms}
    return {
        "date": "20250101-120000",
        "endpoint_type": "vllm",
        "backend": "vllm",
        "label": None,
        "model_id": "meta-llama/Llama-3.1-8B-Instruct",
        "tokenizer_id": "meta-llama/Llama-3.1-8B-Instruct",
        "num_prompts": n + 2,
        "request_rate": "inf",
        "burstiness": 1.0,
        "max_concurrency": 8,
        "duration": n / rate,
        "completed": n,
        "failed": 2,
        "total_input_tokens": n * prompt,
        "total_output_tokens": n * output,
        "request_throughput": rate,
        "request_goodput": None,
        "output_throughput": rate * output,
        "total_token_throughput": rate * (output + prompt),
        "max_output_tokens_per_s": 1e4,
        "max_concurrent_requests": 9,
        "rtfx": 0.0,
        **{f"{name}_{key}_ms": ms for key, ms in figures.items() for name in ("mean", "median", "std", "p99")},
    }


def without(result: dict[str, Any], *metrics: str) -> dict[str, Any]:
    """With the figures of `--percentile-metrics` that leave these out."""
    return {k: value for k, value in result.items() if not k.endswith(tuple(f"_{m}_ms" for m in metrics))}


def detailed(result: dict[str, Any]) -> dict[str, Any]:
    """With the lists that `--save-detailed` keeps."""
    lists = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors")
    return {**result, **{key: [] for key in lists}}


def guidellm_result(*runs: tuple[float, int, float]) -> dict[str, Any]:
    """A report of GuideLLM with these rates, output tokens and times between tokens.

    The keys of versions 0.2 to 0.7 (schemas/metrics.py, schemas/statistics.py).
    """

    def summary(value: float) -> dict[str, Any]:
        other = {"mean": 1e9, "median": 1e9, "mode": 1e9, "count": 3, "total_sum": 3e9}
        return {
            "successful": {**other, "mean": value, "percentiles": {"p50": 0.0}, "pdf": None},
            "incomplete": other,
            "errored": other,
            "total": other,
        }

    return {
        "metadata": {"version": 2, "guidellm_version": "0.7.3"},
        "config": {},
        "benchmarks": [
            {
                "type_": "generative_benchmark",
                "metrics": {
                    "request_totals": {"successful": 90, "incomplete": 8, "errored": 2, "total": 100},
                    "request_latency": summary(1e6),
                    "requests_per_second": summary(rate),
                    "prompt_token_count": summary(500.0),
                    "output_token_count": summary(float(output)),
                    "inter_token_latency_ms": summary(itl_ms),
                    "time_per_output_token_ms": summary(1e6),
                },
            }
            for rate, output, itl_ms in runs
        ],
    }


def written(path: Path, *documents: Any) -> Path:
    path.write_text("\n".join(json.dumps(each) for each in documents))
    return path


def test_both_tools_say_the_same_of_the_same_runs(tmp_path: Path) -> None:
    """The mean batch is the throughput times the time that a request decodes; a file may hold several runs."""
    runs = [(2.0, 101, 10.0), (8.0, 51, 20.0)]
    of_vllm = written(tmp_path / "vllm.json", *(vllm_result(*run) for run in runs))
    of_guidellm = written(tmp_path / "guidellm.json", guidellm_result(*runs))
    found = read_bench_results([of_vllm]).runs
    assert [run[:4] for run in found] == [run[:4] for run in read_bench_results([of_guidellm]).runs]
    assert [run.batch for run in found] == pytest.approx([2.0, 8.0])
    assert [run.seen for run in found] == pytest.approx([3.0, 8.0]), "its own, but no more than are open"
    for key in ("config", "args"):
        report = guidellm_result(*runs)
        report["benchmarks"][0][key] = {"strategy": {"type_": "poisson", "rate": 2.0}}
        report["benchmarks"][1][key] = {"strategy": {"type_": "concurrent", "streams": 8}}
        strategies = read_bench_results([written(tmp_path / "guidellm.json", report)]).runs
        assert [run.seen for run in strategies] == pytest.approx([3.0, 8.0])
    assert [(run.itl_ms, run.prompt) for run in found] == [(10.0, 500.0), (20.0, 500.0)]


PAGE = """# HELP vllm:iteration_tokens_total Histogram of number of tokens per engine_step.
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_bucket{engine="0",le="+Inf",model_name="m"} 5000.0
vllm:iteration_tokens_total_count{engine="0",model_name="m"} 5000.0
vllm:generation_tokens_total{engine="0",model_name="m"} 10100.0
vllm:request_prompt_tokens_sum{engine="0",model_name="m"} 50000.0
vllm:request_prompt_tokens_count{engine="0",model_name="m"} 100.0
vllm:request_generation_tokens_sum{engine="0",model_name="m"} 10100.0
vllm:request_generation_tokens_count{engine="0",model_name="m"} 100.0
vllm:GAPS_sum{engine="0",model_name="m"} 100.0
vllm:GAPS_count{engine="0",model_name="m"} 10000.0
vllm:lora_requests_info{max_lora="4",running_lora_adapters="",waiting_lora_adapters=""} 1.7e+09
"""
"""Names and labels of vLLM's page (vllm/v1/metrics/loggers.py)."""


@pytest.mark.parametrize("gaps", ["inter_token_latency_seconds", "time_per_output_token_seconds"])
def test_a_scrape_says_the_mean_step(tmp_path: Path, gaps: str) -> None:
    """Of all steps since the start: tokens after the first, over the steps; lengths and gaps of old and new names."""
    page = tmp_path / "metrics.txt"
    page.write_text(PAGE.replace("GAPS", gaps))
    (run,) = read_bench_results([page]).runs
    bench = vllm_result(2.0, 101, 10.0)
    assert run[:4] == pytest.approx(read_bench_results([written(tmp_path / "bench.json", bench)]).runs[0][:4])


def test_options_of_the_tool_change_no_figure(tmp_path: Path) -> None:
    """`--save-detailed`, other percentiles, no tpot among the metrics and the list of a sweep give the same rows."""
    plain = vllm_result(2.0, 101, 10.0)
    (expected,) = read_bench_results([written(tmp_path / "plain.json", plain)]).runs
    (tmp_path / "sweep.json").write_text(json.dumps([plain | {"run_number": 0}, plain], indent=4))
    assert read_bench_results([tmp_path / "sweep.json"]).runs == (expected, expected)
    variants = (
        detailed(plain),
        {**plain, "p50_tpot_ms": 9.0, "p99.9_tpot_ms": 30.0},
        without(plain, "ttft", "itl"),
        without(plain | {"mean_itl_ms": 10.0}, "tpot"),
    )
    for k, each in enumerate(variants):
        assert read_bench_results([written(tmp_path / f"{k}.json", each)]).runs == (expected,)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("{}", "vllm bench serve"),
        ("[1]", "vllm bench serve"),
        ("{", "/metrics or .* got no JSON"),
        ("[" * 100_000, "JSON"),
        ('{"benchmarks": []}', "GuideLLM"),
        ('{"request_throughput": 1' + "0" * 400 + "}", "run 1: .* request throughput"),
        (json.dumps(vllm_result(2.0, 100, 0.0)), "run 1: .* time between tokens"),
        (json.dumps(vllm_result(2.0, 1, 5.0)), "two tokens"),
        (json.dumps(without(vllm_result(2.0, 100, 5.0), "tpot", "itl")), "--percentile-metrics"),
        (json.dumps(vllm_result(2.0, 100, 5.0) | {"ramp_up_strategy": "linear"}), "rate rises"),
        (json.dumps(vllm_result(2.0, 100, 5.0) | {"spec_decode_acceptance_length": 2.1}), "speculative"),
        (json.dumps(vllm_result(2.0, 100, 5.0) | {"completed": 0}), "mean input tokens"),
        (json.dumps(guidellm_result((2.0, 100, 5.0)) | {"benchmarks": [{}]}), "request throughput"),
        (PAGE, "time between tokens"),
        (PAGE.replace('running_lora_adapters=""', 'running_lora_adapters="a1"'), "base model's steps alone"),
    ],
)
def test_what_is_no_result_is_refused(tmp_path: Path, text: str, rule: str) -> None:
    """Other files, and runs that completed nothing or whose answers have one token, name the file and the run."""
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(FileFormatError, match=rule):
        read_bench_results([path])


def estimated(root: Path, model: str, known: Profile, reference: str) -> Profile:
    """The server of a calibrated profile, estimated from the other one."""
    return estimate_profile(
        read_model_config(root / "tests" / "data" / "models" / f"{model}.json"),
        "h100-64gb",
        max_model_len=known.engine.max_model_len,
        max_num_seqs=known.engine.max_num_seqs,
        max_num_batched_tokens=known.engine.max_num_batched_tokens,
        version=known.engine.version,
        reference=reference,
    )


def test_runs_bring_an_estimate_near_the_server(root: Path, tmp_path: Path) -> None:
    """Two runs of each calibrated server bring a third run of its base model near; terms of adapters stay."""
    for model, name, reference in (("llama-3.1-8b", LLAMA, QWEN), ("qwen-2.5-7b", QWEN, LLAMA)):
        known, estimate = load_profile(name), estimated(root, model, load_profile(name), reference)
        alone = {
            rate: packer.Workload(
                [packer.Adapter("base", 8, rate)], packer.Lengths.gamma(512.0, 0.6), packer.Lengths.gamma(128.0, 0.6)
            )
            for rate in (1.0, 5.0, 12.0)
        }

        def tpot_ms(profile: Profile, rate: float, fleets: dict[float, packer.Workload] = alone) -> tuple[float, float]:
            found = packer.simulate(fleets[rate], without_adapters(profile), max_loras=1, duration_s=60.0)
            return found.mean_tpot_ms, found.request_throughput

        runs = []
        for rate in (1.0, 12.0):
            tpot, throughput = tpot_ms(known, rate)
            runs.append(vllm_result(throughput, 128, tpot, 512))
        better = improved(estimate, read_bench_results([written(tmp_path / "r.json", *runs)]))
        assert not better.calibrated
        real, before, after = (tpot_ms(each, 5.0)[0] for each in (known, estimate, better))
        assert abs(after / real - 1.0) < min(0.08, abs(before / real - 1.0))
        assert better.errors["base_tpot_p90"] < estimate.errors["base_tpot_p90"]
        for term in ("per_adapter_ms", "per_slot_rank_ms"):
            assert better.latency.coefficients[term] == estimate.latency.coefficients[term]


@pytest.mark.parametrize("rate", [0.5, 4.0])
def test_light_runs_of_a_mixture_of_experts_give_its_factor(rate: float, tmp_path: Path) -> None:
    """Its steps read the experts of the request itself and of prompts: steps 1.3 times as long are found as such."""
    estimate = estimate_profile("Qwen/Qwen3-30B-A3B", "h100-80gb")
    law = without_adapters(estimate).latency.coefficients
    slower = without_adapters(estimate).with_coefficients(**{term: 1.3 * ms for term, ms in law.items()})
    alone = packer.Workload(
        [packer.Adapter("base", 8, rate)], packer.Lengths.gamma(800.0, 0.5), packer.Lengths.gamma(120.0, 0.5)
    )
    run = packer.simulate(alone, slower, max_loras=1, duration_s=300.0)
    result = vllm_result(run.request_throughput, 120, run.mean_tpot_ms, 800) | {"max_concurrency": None}
    better = improved(estimate, read_bench_results([written(tmp_path / "r.json", result)]))
    factor = better.latency.coefficients["base_ms"] / estimate.latency.coefficients["base_ms"]
    assert factor == pytest.approx(1.3, rel=0.03)


def test_the_spread_of_lengths_lengthens_no_step(tmp_path: Path) -> None:
    """Long outputs are decoded in more steps and long prompts attend more: a server that is as estimated is found to
    be, by the lengths that vLLM's `--save-detailed` records, or GuideLLM's variances; without them, as where one is no
    length, it is 12 % slower."""
    estimate = estimate_profile("meta-llama/Llama-3.1-8B-Instruct", "h100-80gb")
    lengths = packer.Lengths.gamma(2000.0, 1.5), packer.Lengths.gamma(300.0, 1.5)
    fleet = packer.Workload([packer.Adapter("base", 0, 8.0)], *lengths, length_correlation=0.0)
    run = packer.simulate(fleet, estimate, max_loras=0)
    sent = run.raw.requests
    inputs, outputs = sent.input_tokens, sent.output_tokens
    figures = vllm_result(run.request_throughput, round(outputs.mean()), run.mean_tpot_ms, round(inputs.mean()))
    of_vllm = figures | {"max_concurrency": None, "input_lens": inputs.tolist(), "output_lens": outputs.tolist()}
    of_guidellm = guidellm_result((run.request_throughput, round(outputs.mean()), run.mean_tpot_ms))
    (measured,) = of_guidellm["benchmarks"]
    measured["config"] = {"strategy": {"type_": "poisson"}}
    for key, tokens in (("prompt", inputs), ("output", outputs)):
        measured["metrics"][f"{key}_token_count"]["successful"] |= {"mean": tokens.mean(), "variance": tokens.var()}
    odd = ({**of_vllm, "output_lens": [each, *of_vllm["output_lens"][1:]]} for each in (None, [1], -1, 1e200))
    for result in (of_vllm, of_guidellm, *odd):
        better = improved(estimate, read_bench_results([written(tmp_path / "r.json", result)]))
        factor = better.latency.coefficients["base_ms"] / estimate.latency.coefficients["base_ms"]
        assert factor == pytest.approx(1.0 if result in (of_vllm, of_guidellm) else 1.12, abs=0.05)


def test_runs_near_the_token_budget_are_left_out(root: Path, tmp_path: Path) -> None:
    """Of a light and a saturated run the light one counts; a saturated one alone is refused, as a calibrated base."""
    estimate = estimated(root, "llama-3.1-8b", load_profile(LLAMA), QWEN)
    light = read_bench_results([written(tmp_path / "light.json", vllm_result(2.0, 101, 15.0))])
    full = read_bench_results([written(tmp_path / "full.json", vllm_result(40.0, 101, 100.0))])
    both = Measured((*light.runs, *full.runs))
    assert improved(estimate, both).latency == improved(estimate, light).latency
    with pytest.raises(ModelError, match="lower rates"):
        improved(estimate, full)
    far = read_bench_results([written(tmp_path / "far.json", vllm_result(2.0, 101, 40.0))])
    assert "was it this model" in bands_in_words(improved(estimate, far))
    assert "was it this model" not in bands_in_words(improved(estimate, light))
    with pytest.raises(IncompatibleError, match="estimate"):
        improved(load_profile(LLAMA), light)
