"""Every reader of users' files: a valid file for it, how it is changed, and what must hold of what was read."""

from __future__ import annotations

import gzip
import io
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import mutate
import numpy as np
import use

ROOT = Path(__file__).resolve().parents[2]
PROFILE = use.PROFILE


@dataclass(frozen=True)
class Target:
    """A reader, a valid file for it and changes to that file.

    `use` evaluates what was read: it may raise `PackerError` and nothing else. `rare`: a case takes 0.1 s and
    more, so that one comes in 20 rounds.
    """

    name: str
    file: str
    seed: bytes
    changes: Sequence[mutate.Change]
    read: Callable[[str], Any]
    use: Callable[[Any], object] = lambda _: None
    rare: bool = False


def _bench(path: str) -> Any:
    from packer.fit.bench_results import read_bench_results

    return read_bench_results([path])


PAGE = b"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 3.0
vllm:num_requests_waiting{engine="0"} 1
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:num_preemptions_total{engine="0"} 2
vllm:generation_tokens_total{engine="0",model_name="x"} 5e3 1700000000
vllm:prompt_tokens_total{engine="0"} 7000
vllm:time_to_first_token_seconds_sum{engine="0"} 12.5
vllm:time_to_first_token_seconds_count{engine="0"} 60
vllm:prefix_cache_queries_total 900
vllm:prefix_cache_hits_total 300
vllm:cache_config_info{block_size="32",num_gpu_blocks="129"} 1
vllm:lora_requests_info{max_lora="4",running_lora_adapters="a,b",waiting_lora_adapters=""} 1.7e9
"""


def _page(path: str) -> str:
    """A page as it comes from a server."""
    return Path(path).read_bytes().decode(errors="replace")


def _rates(path: str) -> Any:
    from packer.objectives.headroom import read_rates

    return read_rates(path, use.fleet_of_two())


def _settings(path: str) -> None:
    """The defaults that a packer.toml gives to two commands, converted as click does it."""
    from packer.cli import config, run

    os.environ[config.VARIABLE] = path
    try:
        for words in (["memory", "--max-loras", "4"], ["profiles", "list"]):
            code = run(words)
            assert code in (0, 2), f"exit code {code}"
    finally:
        del os.environ[config.VARIABLE]


def targets() -> list[Target]:
    """All readers, with their valid files."""
    return [*_workloads(), *_traces(), *_documents(), *_tables(), *_models(), *_parquet()]


TEXT = (mutate.raw, mutate.words)
JSON = (mutate.raw, mutate.words, mutate.json_text, mutate.json_text)
TOML = (mutate.raw, mutate.words, mutate.toml_text, mutate.toml_text)


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


def _workloads() -> list[Target]:
    from packer.io.workloads import read_workload

    table = b'# c\nadapter,rank,rate,input_tokens,input_cv\na,8,0.1,120,0.5\n"b,c",16,2e-3,,\n'
    adapters = [
        {"name": "a", "rank": 8, "rate": 0.1,
         "input_tokens": {"kind": "lognormal", "mean": 90, "cv": 1.2, "high": 4096}},
        {"name": "b", "rank": 16, "rate": 0.2, "output_tokens": {"kind": "empirical", "values": [5, 9.5]}},
    ]  # fmt: skip
    changing = {"kind": "piecewise", "period_s": 60.0, "factors": [1, 0.5]}
    replay = {"kind": "trace", "time_s": [0.0, 1.5], "adapter": [0, 1], "input_tokens": [5, 6], "output_tokens": [7, 8]}
    periods = {"adapters": adapters, "arrivals": changing, "input_tokens": {"kind": "gamma", "mean": 9, "cv": 1}}
    yaml = (
        b"adapters:\n- {name: a, rank: 8, rate: 1e-3}\n- name: b\n  rank: 16\n  rate: 0.5\n"
        b"arrivals:\n  kind: unpredictable\n  period_s: 60\n"
    )
    classes = b"adapter,rank,rate,model,slo_class\na,8,0.1,llama,\nb,16,2e-3,qwen,fast\n"
    job = {"sample_tokens": {"kind": "gamma", "mean": 300, "cv": 0.5}, "rank": 16, "batch": 2, "samples": 50}
    slo = {"p95_ttft_ms": 2000, "adapter_share": 0.9, "classes": {"fast": {"mean_itl_ms": 50}}}
    training = {
        "adapters": [{**adapters[0], "slo_class": "fast"}, adapters[1]], "slo": slo, "fine_tuning": job,
    }  # fmt: skip
    packed = gzip.compress(table, mtime=0)
    return [
        Target("workload csv", "w.csv", table, TEXT, read_workload, use.workload),
        Target("workload gzip", "w.csv.gz", packed, (mutate.packed,), read_workload, use.workload),
        Target("workload json", "w.json", _json(periods), JSON, read_workload, use.workload),
        Target("workload replay", "w.json", _json({"adapters": adapters, "arrivals": replay}), JSON,
               read_workload, use.workload),
        Target("workload classes", "w.csv", classes, TEXT, read_workload, use.classes),
        Target("workload training", "w.json", _json(training), JSON, read_workload, use.classes),
        Target("workload yaml", "w.yaml", yaml, TEXT, read_workload, use.workload),
    ]  # fmt: skip


def _traces() -> list[Target]:
    from packer.traces.prometheus import read_export
    from packer.traces.read import read_trace

    named = b"timestamp,adapter,rank,input_tokens,output_tokens\n0,a,8,10,3\n5.5,b,16,10,3\n9,a,8,4,5\n"
    azure = b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,48,10\n2023-11-16 18:17:04,31,8\n"
    lines = (
        b'{"timestamp": 0, "input_length": 10, "output_length": 3}\n'
        b'{"timestamp": 900, "input_length": 1, "output_length": 2}\n'
    )
    usage = {"prompt_tokens": 5, "completion_tokens": 4}
    log = [_json({"time": 5e8 + 100 * k, "model": "ab"[k % 2], "usage": usage}) for k in range(4)]
    labels = {"requested_model": "a", "gen_ai_request_model": "a", "running_lora_adapters": "a,b"}
    labels |= {"adapter_name": "a", "level": "gpu", "rank": "8"}
    series = {"metric": labels, "values": [[60, "5"], [120, "7"]]}
    answer = {"status": "success", "data": {"resultType": "matrix", "result": [series]}}
    names = ("requests", "input_tokens", "output_tokens", "running", "loaded", "load_sum", "load_count")
    metrics = {"window_s": 60, **dict.fromkeys(names, answer)}
    newer = metrics | {"running": answer | {"data": {"resultType": "matrix", "result": []}}}
    turns = [
        {"timestamp": 50 * k, "model": "ab"[k % 2], "session_id": f"s{k // 2}",
         "prompt_tokens": 40 + 30 * k, "completion_tokens": 9, "cached_tokens": 16 * (k % 3)}
        for k in range(8)
    ]  # fmt: skip
    blocks = [
        {"timestamp": 500 * k, "input_length": 600 + 9 * k, "output_length": 5, "hash_ids": [1, 2 + k % 3]}
        for k in range(6)
    ]
    return [
        Target("log of sessions", "log.jsonl", b"\n".join(map(_json, turns)), TEXT, read_trace, use.log),
        Target("trace of blocks", "t.jsonl", b"\n".join(map(_json, blocks)), TEXT, read_trace, use.log),
        Target("trace csv", "t.csv", named, TEXT, read_trace, use.trace),
        Target("trace azure", "t.csv", azure, TEXT, read_trace),
        Target("trace jsonl", "t.jsonl", lines, TEXT, read_trace),
        Target("access log", "log.jsonl", b"\n".join(log), TEXT, read_trace),
        Target("metrics", "m.json", _json(metrics), JSON, read_export, use.metrics),
        Target("metrics of slots", "m.json", _json(newer), JSON, read_export, use.metrics),
    ]


def _documents() -> list[Target]:
    from packer.export.sources import read_sources
    from packer.fit.model_config import read_model_config
    from packer.io.clusters import read_cluster
    from packer.io.plans import load_plan, plan_to_dict
    from packer.io.profiles import load_profile
    from packer.live.fleet_file import LiveState, read_live_fleet
    from packer.live.launch import launch_text, read_launch
    from packer.live.setup import tiny_launch
    from packer.planning.solve import solve
    from packer.report.page import read_comparison
    from packer.twin.cluster.system import load_system

    cluster = (
        f'schema = 1\n[[kinds]]\nname = "h"\nprofile = "{PROFILE}"\nmax_loras = 8\nmax_lora_rank = 16\n'
        '[[nodes]]\ncount = 2\nservers = ["h"]\n[slo]\nttft_ms = 2000\n'
    )
    training = (
        "network_ms = 2\n" + cluster.replace("servers", "host_gb = 4.5\nservers") + "[store]\n"
        "bandwidth_gb_s = 1.25\nlatency_ms = 5\nconcurrent = 2\n[fine_tuning]\nsample_tokens = 512\n"
    )
    settings = b'profile = "x"\n[memory]\nmax-lora-rank = 8\nmax-adapters = 64\n[profiles.list]\njson = true\n'
    system = (ROOT / "twin" / "cluster" / "systems" / "affinity.toml").read_bytes()
    launch = launch_text(tiny_launch("/opt/vllm/bin/python", "0.32.0")).encode()
    profile = (ROOT / "twin" / "profiles" / f"{PROFILE}.toml").read_bytes()
    plan = _json(plan_to_dict(solve(use.fleet_of_six(), load_profile(PROFILE), predictor="tree")))
    servers = (
        b'schema = 1\nadapters = "/a/{name}"\nstate = "s.json"\n[[servers]]\nurl = "http://gpu-0:8000"\nroom = 8\n'
        b'start = "up {name}"\n[[servers]]\nurl = "http://gpu-1:8000"\n'
        b'[router]\nformat = "nginx"\nfile = "n.conf"\nreload = "true"\n[limits]\ndrain_s = 9\ntries = 2\n'
    )
    state = {
        "schema": 1, "plan": "a plan", "servers": {"gpu-0": {"a": 0.5, "b": 1.0}, "gpu-1": {"a": 0.5}},
        "doing": "load a", "history": [{"time_s": 5.5, "step": "load b", "error": "x"}],
    }  # fmt: skip
    config = (ROOT / "tests" / "data" / "models" / "qwen-2.5-7b.json").read_bytes()
    return [
        Target("plan", "p.json", plan, JSON, load_plan, use.plan),
        Target("plan changed", "p.json", plan, JSON, partial(load_plan, changed=True), use.changed_plan),
        Target("profile", "p.toml", profile, TOML, load_profile, use.profile),
        Target("cluster", "c.toml", cluster.encode(), TOML, read_cluster, use.cluster),
        Target("cluster training", "c.toml", training.encode(), TOML, read_cluster, use.cluster),
        Target("system", "y.toml", system, TOML, load_system, use.system),
        Target("settings", "packer.toml", settings, TOML, _settings),
        Target("launch", "l.toml", launch, TOML, read_launch),
        Target("servers", "servers.toml", servers, TOML, read_live_fleet, use.servers),
        Target("state of servers", "s.json", _json(state), JSON, LiveState.read, use.state),
        Target("model config", "config.json", config, JSON, read_model_config),
        Target("comparison", "c.json", b'[{"solver": "greedy", "gpus": 3}]', JSON, read_comparison),
        Target("sources json", "s.json", b'{"a": "acme/a", "b": "/x"}', JSON, read_sources),
        Target("sources yaml", "s.yaml", b"a: acme/a\nb: /x\n", TEXT, read_sources),
    ]


def _tables() -> list[Target]:
    from packer.export.sources import read_sources
    from packer.fit.tables import read_rows, read_runs
    from packer.live.results import read_result
    from packer.live.step_log import Steps, read_steps
    from packer.traces.assign import read_ranks

    bench: dict[str, Any] = {"request_throughput": 4.0, "completed": 100, "mean_tpot_ms": 12.5}
    bench |= {"total_input_tokens": 50_000, "total_output_tokens": 20_000}
    means = {"requests_per_second": 2.0, "prompt_token_count": 500.0, "output_token_count": 200.0}
    means["inter_token_latency_ms"] = 11.0
    metrics = {name: {"successful": {"mean": value}} for name, value in means.items()}
    guide = {"benchmarks": [{"metrics": metrics}]}
    totals = {"iteration_tokens_total_count": 5000.0, "generation_tokens_total": 10100.0}
    for name, total in (("request_prompt_tokens", 5e4), ("request_generation_tokens", 1e4),
                        ("inter_token_latency_seconds", 100.0)):  # fmt: skip
        totals |= {f"{name}_sum": total, f"{name}_count": 100.0}
    page = "".join(f'vllm:{name}{{engine="0"}} {value}\n' for name, value in totals.items())
    size = '{"m": 8, "num_loras": 2, "k": %d, "n": %d, "num_slices": %d}'
    kernels = "[- lora -]\n  |  LORA_SHRINK()  |  LORA_EXPAND(add_inputs=True)\n"
    for slices in (1, 2, 3):
        kernels += f"{size % (4096, 16, slices)}  |  12.5  |  \n{size % (16, 4096, slices)}  |    |  9.5\n"
    kernels += "\nTimes are in microseconds (us).\n"
    runs = (
        b"run_id,model,family,max_loras,n_adapters,max_lora_rank,rate_counts,size_counts,total_tok_s,status\n"
        b"r0,m,f,8,4,16,0.5:2;0.1:2,8:1;16:3,400,ok\nr1,m,g,8,2,16,0.5:2,16:2,,oom\n"
    )
    names = [item.name for item in fields(Steps)]
    steps = [names, *([str(k + j) for j in range(len(names))] for k in range(3))]

    def rows(path: str) -> object:
        return read_rows(path, ("max_loras", "status"))

    return [
        Target("sources csv", "s.csv", b"adapter,source\na,acme/a\nb,/x\n", TEXT, read_sources),
        Target("ranks", "k.csv", b"adapter,rank\na,8\nb,16\n", TEXT, read_ranks),
        Target("rates", "r.csv", b"adapter,mean,peak\na,1,2\nb,0.5,0.25\n", TEXT, _rates, use.rates),
        Target("bench vllm", "b.json", _json(bench), JSON, _bench, use.bench),
        Target("bench vllm lines", "b.json", b"\n".join([_json(bench)] * 2), TEXT, _bench, use.bench),
        Target("bench guidellm", "b.json", _json(guide), JSON, _bench, use.bench),
        Target("bench metrics", "m.txt", page.encode(), TEXT, _bench, use.bench),
        Target("bench lora kernels", "l.txt", kernels.encode(), TEXT, _bench, use.bench),
        Target("runs", "runs.csv", runs, TEXT, partial(read_runs, model="m"), use.runs),
        Target("calibration rows", "k.csv", b"max_loras,status\n8,ok\n16,oom\n", TEXT, rows),
        Target("step log", "l.csv", "\n".join(map(",".join, steps)).encode(), TEXT, read_steps),
        Target("page of metrics", "m.txt", PAGE, TEXT, _page, use.page),
        Target("live result", "r.npz", _live_result(), (mutate.raw,), read_result),
    ]


def _live_result() -> bytes:
    from packer.live import results

    times = {"duration_s": 5.0, "started_monotonic_s": 1.0, "started_unix_s": 2.0}
    info = {**times, "errors": {}, "ended": "done", "metrics": []}
    out = io.BytesIO()
    arrays: dict[str, Any] = {name: np.zeros(3) for name in results._ARRAYS}  # noqa: SLF001
    np.savez_compressed(out, info=np.array(json.dumps(info)), **arrays)
    return out.getvalue()


def _models() -> list[Target]:
    """The shipped tree, forest and boosted trees, and small machines and neighbours made by hand."""
    from packer.predictors.store import Model, read_model, to_bytes
    from packer.predictors.targets import OUTPUTS

    shipped = {path.name.split(".")[-2]: path for path in (ROOT / "predictors" / "models").glob("*llama*.packer")}
    header = dict(read_model(shipped["tree"]).header)
    features = len(header["features"])
    rng = np.random.default_rng(0)

    def drawn(*shape: int) -> Any:
        return rng.normal(size=shape).astype(np.float32)

    scaling = {"center": drawn(features), "scale": np.ones(features, dtype=np.float32)}
    machine = {**scaling, "constants": np.ones((len(OUTPUTS), 2))}
    for k in range(len(OUTPUTS)):
        machine |= {f"vectors_{k}": drawn(5, features), f"weights_{k}": drawn(5)}
    neighbours = {"points": drawn(9, features), "values": drawn(9, len(OUTPUTS)), "k": np.array([3])}
    files = {
        "svm": to_bytes(Model({**header, "kind": "svm", "family": "machine"}, machine)),
        "knn": to_bytes(Model({**header, "kind": "knn", "family": "neighbours"}, {**scaling, **neighbours})),
        **{kind: shipped[kind].read_bytes() for kind in ("tree", "boosting", "forest")},
    }
    return [
        Target(f"model {kind}", "m.packer", data, (mutate.model,), read_model, use.model,
               rare=kind in ("boosting", "forest"))
        for kind, data in files.items()
    ]  # fmt: skip


def _parquet() -> list[Target]:
    import polars as pl

    from packer.io.parquet import parquet_bytes
    from packer.io.workloads import read_workload
    from packer.predictors.build import build_dataset
    from packer.predictors.dataset import read_dataset
    from packer.testing.analytic import small_profile
    from packer.traces.read import read_trace

    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "d.parquet"
        build_dataset(small_profile(), built, rows=8, jobs=1)
        dataset = built.read_bytes()
    table = pl.DataFrame({"adapter": ["a", "b"], "rank": [8, 16], "rate": [0.5, 0.1]})
    requests = table.with_columns(timestamp=pl.Series([0.0, 9.0]), input_tokens=3, output_tokens=4).drop("rate")
    change = (mutate.parquet,)
    return [
        Target("workload parquet", "w.parquet", parquet_bytes(table), change, read_workload, use.workload, True),
        Target("trace parquet", "t.parquet", parquet_bytes(requests), change, read_trace, use.trace, True),
        Target("data set", "d.parquet", dataset, change, read_dataset, rare=True),
    ]
