"""What is done with what was read: it may raise `PackerError` and nothing else."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from packer.errors import PackerError

PROFILE = "h100-64gb/llama-3.1-8b-instruct"


def workload(fleet: Any) -> None:
    """Written and read again, and simulated for 5 s."""
    from packer.io.profiles import load_profile
    from packer.io.workload_schema import workload_from_dict, workload_to_dict
    from packer.twin.simulate import simulate

    again = workload_from_dict(json.loads(json.dumps(workload_to_dict(fleet))))
    assert again.names == fleet.names
    assert np.array_equal(again.given_rates, fleet.given_rates)
    assert 0.0 < fleet.offered_tok_s < np.inf
    if fleet.rate < 1e4:
        found = simulate(fleet, load_profile(PROFILE), max_loras=8, duration_s=5.0)
        assert np.isfinite(found.total_token_throughput)


def classes(fleet: Any) -> None:
    """Of several models and classes: written, read again, limits looked up, training simulated."""
    from packer.io.profiles import load_profile
    from packer.io.workload_schema import workload_from_dict, workload_to_dict
    from packer.twin.simulate import simulate

    again = workload_from_dict(json.loads(json.dumps(workload_to_dict(fleet))))
    assert (again.names, again.models, again.slo) == (fleet.names, fleet.models, fleet.slo)
    assert all(np.isfinite(column).all() for column in fleet.slo.columns(fleet))
    if fleet.rate < 1e4:
        only = fleet.subset([k for k, a in enumerate(fleet.adapters) if a.model == fleet.adapters[0].model])
        only = replace(only, adapters=[replace(each, model=None) for each in only.adapters])
        found = simulate(only, load_profile(PROFILE), max_loras=8, duration_s=5.0)
        assert np.isfinite(found.total_token_throughput)


def cluster(cluster: Any) -> None:
    """Simulated for 5 s, where it is small."""
    from packer.twin.cluster.simulate import simulate_cluster

    if len(cluster) < 20:
        found = simulate_cluster(fleet_of_six(), cluster, duration_s=5.0)
        assert np.isfinite(found.total_token_throughput)


def system(system: Any) -> None:
    """Run on two servers for 5 s."""
    from packer.cluster import Cluster
    from packer.io.profiles import load_profile
    from packer.twin.cluster.simulate import simulate_cluster

    cluster = Cluster.of(load_profile(PROFILE), 2, max_loras=4, max_lora_rank=16)
    found = simulate_cluster(fleet_of_six(), cluster, system, duration_s=5.0)
    assert np.isfinite(found.total_token_throughput)


def runs(runs: Any) -> None:
    """The fleet of each run."""
    from packer.fit.runs import fleet_of

    for run in runs:
        assert fleet_of(run).offered_tok_s > 0


def bench(rows: Any) -> None:
    """An estimate improved by these runs."""
    from packer.fit.bench_results import improved
    from packer.io.profiles import load_profile
    from packer.twin.margin import BAND_KEYS

    estimate = replace(load_profile(PROFILE), calibrated=False, errors=dict.fromkeys(BAND_KEYS, 1.0))
    found = improved(estimate, rows)
    assert all(np.isfinite(value) for value in found.latency.coefficients.values())


def rates(rates: Any) -> None:
    """The loads of a schedule or of a headroom."""
    from packer.objectives.headroom import with_rates

    for each in rates.values():
        assert np.isfinite(with_rates(fleet_of_two(), each).rates).all()


def trace(trace: Any) -> None:
    """Rates by time and the workload that it shows."""
    from packer.traces.measure import measure_workload
    from packer.traces.pattern import rates_of

    assert np.isfinite(trace.time_s).all()
    assert np.isfinite(rates_of(trace, 60.0).rates).all()
    workload(measure_workload(trace))


def log(trace: Any) -> None:
    """As a trace whose requests have adapters with ranks."""
    from packer.traces.assign import assign_adapters

    if trace.adapter is None:
        trace = assign_adapters(trace, 2, ranks=[8, 16])
    globals()["trace"](replace(trace, ranks=(8,) * len(trace.names)))


def plan(plan: Any) -> None:
    """Exported in every format."""
    from packer.export.formats import FORMATS, export_plan
    from packer.export.servers import Options

    options = Options(adapters_claim="adapters", token_secret="hf")
    buckets = Options(sources={name: f"s3://loras/{name}" for name in plan.workload.names})
    for name in FORMATS:
        try:
            files = export_plan(plan, name, buckets if name == "ray" else options)
        except PackerError:  # a name or an engine that this format does not take
            continue
        assert all(text.isascii() for text in files.values())


def changed_plan(plan: Any) -> None:
    """The placement is whole, and evaluations of the same servers make it a plan that every reader takes."""
    from packer.placement import check_placement

    check_placement(plan.workload, plan.bins, plan.unplaced)
    assert len(plan.evaluations) == len(plan.bins)
    for item in plan.bins:
        assert item.offered_tok_s(plan.workload) > 0


def profile(profile: Any) -> None:
    """One adapter, simulated for 5 s."""
    from packer.adapter import Adapter
    from packer.twin.simulate import simulate
    from packer.workload import Workload

    found = simulate(Workload([Adapter("a", 8, 1.0)]), profile, max_loras=1, duration_s=5.0)
    assert np.isfinite(found.total_token_throughput)


def servers(fleet: Any) -> None:
    """Where each answers, and its commands."""
    from packer.live.launch import filled

    assert len(fleet.addresses()) == len(fleet.servers)
    for each in fleet.servers:
        fleet.path_of(each.name, 8, each.url)
        filled("start", each.start or "", name=each.name, url=each.url)


def state(state: Any) -> None:
    """The routes that it says."""
    numbers = {name: k for k, name in enumerate(state.servers)}
    for shares in state.routes(numbers).values():
        assert all(0.0 < share <= 1.0 for share in shares.values())


def page(text: str) -> None:
    """Its figures are finite, and so are those of a run that ends with it."""
    from packer.live.metrics import NAMES, grown, page_of, summarise

    before, now = page_of("vllm:prompt_tokens_total 5\nvllm:num_preemptions_total 3"), page_of(text, 1.0)
    assert all(np.isfinite(grown((before, now), key)) for key in NAMES)
    assert now.in_flight is None or all(now.in_flight)
    found = asdict(summarise([(0.0, text), (1.0, text), (2.0, "")]))
    found |= found.pop("kv_cache") or {}
    assert all(value is None or np.isfinite(value) for value in found.values())


def model(model: Any) -> None:
    """Predictions of four servers, which are finite."""
    from packer.predictors.families import family_of
    from packer.predictors.features import NAMES
    from packer.predictors.targets import OUTPUTS

    questions = np.linspace(0.0, 3e4, 4 * len(NAMES), dtype=np.float32).reshape(4, len(NAMES))
    family = family_of(model)
    assert all(np.isfinite(family.rows(questions, k)).all() for k in range(len(OUTPUTS)))


def metrics(answers: Any) -> None:
    """Rates by every gateway's names."""
    from packer.traces.prometheus import SOURCES, parse

    for source in SOURCES.values():
        try:
            found = parse(answers, source)
        except PackerError:
            continue
        assert np.isfinite(found.table.rates).all()


def fleet_of_six() -> Any:
    """Adapters of two ranks."""
    from packer.adapter import Adapter
    from packer.workload import Workload

    return Workload([Adapter(f"a{k}", (8, 16)[k % 2], 0.2) for k in range(6)])


def fleet_of_two() -> Any:
    """Adapters called a and b."""
    from packer.adapter import Adapter
    from packer.workload import Workload

    return Workload([Adapter("a", 8, 1.0), Adapter("b", 8, 1.0)])
