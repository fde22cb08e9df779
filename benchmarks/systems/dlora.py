"""dLoRA (OSDI 2024): merged batches on one server, and requests that move between eight."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from rows import Constant, Row, Section, below, mean, of_seeds, shown

import packer
from packer.cluster import Cluster
from packer.twin.cluster.system import load_system
from packer.twin.run import Run
from packer.workload import Workload

PROFILE = "h100-64gb/llama-3.1-8b-instruct"
RUN_S = 600.0
POLICIES = {"dLoRA": "credit", "unmerged only": "fcfs", "merged only": "merge"}
MODES = {"dLoRA": "periodic", "dispatch and migrate": "migrate", "dispatch": "dispatch"}
BATCH = 16
"""Requests in a batch: the artifact's default."""


def fleet(adapters: int, rate: float, hot: float) -> Workload:
    """Adapters of rank 16; the first has this share of the requests."""
    rates = [rate * hot, *[rate * (1.0 - hot) / (adapters - 1)] * (adapters - 1)]
    return Workload([packer.Adapter(f"a{i}", 16, each) for i, each in enumerate(rates)])


def latency_s(run: Run) -> float:
    """Mean time from arrival to the last token."""
    assert run.raw is not None
    return float(np.nanmean(run.raw.finish_s - run.raw.requests.time_s))


def one_server(policy: str, hot: float, rate: float, seed: int) -> float:
    """Mean latency of eight adapters on one server."""
    how = replace(load_system("dlora"), engine=f"dlora:policy={policy},max_num_seqs={BATCH}", placement=None)
    cluster = Cluster.of(packer.load_profile(PROFILE), 1, max_loras=8, max_lora_rank=16)
    run = packer.simulate_cluster(fleet(8, rate, hot), cluster, how, "round-robin", duration_s=RUN_S, seed=seed)
    return latency_s(run)


def eight_servers(mode: str, seed: int) -> Run:
    """32 adapters on eight servers."""
    how = replace(load_system("dlora"), engine=f"dlora:max_num_seqs={BATCH}", router=f"dlora:mode={mode},batch={BATCH}")
    cluster = Cluster.of(packer.load_profile(PROFILE), 8, max_loras=16, max_lora_rank=16)
    return packer.simulate_cluster(fleet(32, 8 * BUSY, 0.3), cluster, how, duration_s=RUN_S, seed=seed)


BUSY, SATURATED = 4.5, 7.0
"""Req/s of a server: what one serves in batches of 16, and more than it serves unmerged."""


def section(seeds: int) -> Section:
    """Merged batches and migration."""

    def single(hot: float, rate: float) -> dict[str, list[float]]:
        return {n: of_seeds(lambda k, p=p: one_server(p, hot, rate, k), seeds) for n, p in POLICIES.items()}

    runs = {name: of_seeds(lambda k, m=mode: eight_servers(m, k), seeds) for name, mode in MODES.items()}
    moved = {name: [latency_s(run) for run in of] for name, of in runs.items()}
    counts = [np.array([server.completed for server in run.servers]) for run in runs["dispatch"]]
    uneven = 100.0 * mean([float(each.max() / each.mean() - 1.0) for each in counts])
    steps = [packer.load_profile(PROFILE).latency.coefficients[k] for k in ("base_ms", "first_adapter_ms")]

    def text(found: dict[str, list[float]]) -> str:
        return ", ".join(f"{name} {shown(values)}" for name, values in found.items())

    return Section(
        "dlora",
        "dLoRA: merged batches and migration",
        "Wu et al., dLoRA, OSDI 2024: abstract; github.com/LLMServe/dLoRA-artifact at 75f1c43",
        CONSTANTS,
        [
            *(
                Row(
                    f"abstract: mean latency, s, 90 % of {rate:g} req/s for one of 8 adapters",
                    "not to merge is not always beneficial, least when requests are skewed",
                    text(found := single(0.9, rate)),
                    "dLoRA below unmerged only, beyond the interval",
                    below(found["dLoRA"], found["unmerged only"]),
                    f"a first adapter costs {steps[1]:.1f} ms here, a step without any {steps[0]:.1f} ms",
                )
                for rate in (BUSY, SATURATED)
            ),
            Row(
                f"abstract: mean latency, s, 8 adapters of equal rates, {BUSY:g} req/s",
                "merging and unmerging, dynamically",
                text(even := single(1.0 / 8.0, BUSY)),
                "dLoRA below merged only, beyond the interval",
                below(even["dLoRA"], even["merged only"]),
            ),
            Row(
                "abstract: mean latency, s, 32 adapters on 8 servers, 30 % of the requests for one",
                "requests and adapters that move even the load",
                text(moved),
                "dLoRA below dispatch alone, beyond the interval",
                below(moved["dLoRA"], moved["dispatch"]),
                f"with dispatch alone the busiest server completes {uneven:.0f} % more than the mean",
            ),
        ],
        (
            "The paper's own figures are not at hand: only what its abstract says is compared, and no size. The loads "
            "were chosen after runs with both.",
            "The engine is the artifact's scheduler (`packer.papers.dlora`) on the H100's profile of vLLM, whose LoRA "
            "kernels cost less than those that dLoRA was measured with.",
        ),
    )


CONSTANTS = (
    Constant("engine", f"the artifact's scheduler; batches of {BATCH}, its default", "P"),
    Constant("server", "shipped profile of Llama 3.1 8B on an H100 with 64 GB", "A"),
    Constant("load", f"{BUSY:g} req/s for each server, or {SATURATED:g}; rank 16", "A"),
)
