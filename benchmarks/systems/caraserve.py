"""CaraServe: CPU-assisted, rank-aware serving (arXiv 2401.11240)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rows import Constant, Row, Section

import packer
from packer.arrival import Arrivals, RequestTrace
from packer.cluster import Cluster, ServerKind
from packer.lengths import Lengths
from packer.profile import EngineSpec, GpuSpec, LatencySpec, LoadingSpec, MemorySpec, ModelSpec, Profile
from packer.twin.law.law import coefficient_vector
from packer.twin.law.linear import linear_features
from packer.workload import Workload

LAWS = {"BGMV": ("per_padded_rank_ms", 0.00359, 32.08), "MBGMV": ("per_request_rank_ms", 0.00234, 33.5)}
"""Kernel → term, ms per rank, and ms of a step without it: from the eight statements of Figure 5."""
PREFILL_BASE_MS, PREFILL_TOKEN_MS = 32.0, 0.15
LOAD_MS_PER_RANK = 0.36
CELLS = 12_500
KV_BYTES, RANK_BYTES = 0.5 * 2**20, 1.5 * 2**20


def profile(kernel: str) -> Profile:
    """Llama2-7B on an A10, LoRA on q, k, v, with the step law of a kernel."""
    term, per_rank, base = LAWS[kernel]
    return Profile(
        "a10/llama-2-7b-caraserve",
        ModelSpec("llama-2-7b", 13.5e9, KV_BYTES, RANK_BYTES),
        GpuSpec("NVIDIA A10", 24 * 2**30),
        EngineSpec("lightllm", "0", 4096, 4096, 256, block_size=1),
        MemorySpec(CELLS * KV_BYTES, 0.0, 0.0, 1024, "unified"),
        LatencySpec("linear", {"base_ms": base, term: per_rank, "per_prefill_token_ms": PREFILL_TOKEN_MS}),
        LoadingSpec(0.0, LOAD_MS_PER_RANK),
    )


# ---- Figure 5: the law, and which server a request goes to
PRINTED = {"BGMV": (34.8, 35.8), "MBGMV": (35.3, 35.9)}


def step_ms(kernel: str, ranks: Sequence[int]) -> float:
    """A decode step of requests with these ranks, by the step law that the engine charges."""
    state = linear_features(
        decodes=len(ranks), prefill_tokens=0, adapters=len(ranks), sum_ranks=sum(ranks), slots=64, slot_rank=64,
        kv_tokens=0, waiting_scanned=0, waiting=0, graph_max_tokens=512, sum_request_ranks=sum(ranks),
        padded_ranks=len(ranks) * max(ranks),
    )  # fmt: skip
    return float(state[0] @ coefficient_vector(profile(kernel).latency))


def chosen_server(kernel: str) -> int:
    """Where the router sends a request of rank 64 when server 1 runs 24 of rank 32 and server 2 runs 16 of rank 64."""
    first = [packer.Adapter(f"a{i}", 32, 0.1) for i in range(24)]
    second = [packer.Adapter(f"b{i}", 64, 0.1) for i in range(16)]
    new = packer.Adapter("new", 64, 0.1)
    adapters = [*first, *second, new]
    time_s = np.array([*np.linspace(0.0, 1.0, len(adapters) - 1), 30.0])
    outputs = np.full(len(adapters), 3000)
    trace = RequestTrace(time_s, np.arange(len(adapters)), np.full(len(adapters), 20), outputs)
    fleet = Workload(
        adapters, Lengths.constant(20), Lengths.constant(3000), arrivals=Arrivals("trace", trace=trace)
    )
    placement = tuple({each.name: 1.0 for each in (*part, new)} for part in (first, second))
    roomy = profile(kernel)
    kind = ServerKind("a10", roomy, 64, 64)
    cluster = Cluster((kind,), ("a10", "a10"), placement)
    run = packer.simulate_cluster(fleet, cluster, router="rank-aware:slo_ms=36", duration_s=31.0)
    return int(run.requests.filter(run.requests["adapter"] == "new")["server"][0]) + 1


def toy_rows() -> list[Row]:
    """Figure 5."""
    rows = []
    for kernel, printed in PRINTED.items():
        ours = (step_ms(kernel, [32] * 24), step_ms(kernel, [64] * 16))
        rows.append(
            Row(
                f"Fig. 5, {kernel}: decode step of 24 requests of rank 32, of 16 of rank 64, ms",
                " / ".join(f"{value:.1f}" for value in printed),
                " / ".join(f"{value:.2f}" for value in ours),
                "within 0.1 ms",
                all(abs(a - b) <= 0.1 for a, b in zip(ours, printed, strict=True)),
                "the law was derived from these figures",
            )
        )
    for kernel, wanted in (("BGMV", 2), ("MBGMV", 1)):
        found = chosen_server(kernel)
        rows.append(
            Row(
                f"Fig. 5, {kernel}: server of a new request of rank 64, limit 36 ms",
                str(wanted),
                str(found),
                "the same",
                found == wanted,
            )
        )
    return rows


def section(seeds: int) -> Section:
    """The whole comparison."""
    del seeds
    return Section("caraserve", "CaraServe", "arXiv 2401.11240", CONSTANTS, toy_rows())


CONSTANTS = (
    Constant("BGMV, ms", "32.08 + 0.00359 · requests · largest rank", "D", "all eight statements of Fig. 5"),
)  # fmt: skip
