"""S-LoRA: one pool for KV cache and adapters, against memory reserved for adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rows import Constant, Row, Section, mean, of_seeds, shown

import packer
from packer.cluster import Cluster
from packer.lengths import Lengths
from packer.twin.cluster.system import System, load_system
from packer.workload import Workload

PROFILE = "h100-64gb/llama-3.1-8b-instruct"
ADAPTERS = (64, 128, 256, 384)
SLOTS = (16, 32, 64, 96)
RANK, INPUT, OUTPUT = 32, 250.0, 231.0
SATURATING = 40.0
"""Requests per second of all adapters: more than any of the servers completes."""
RUN_S = 600.0


def fleet(adapters: int, rate: float, rank: int = RANK) -> Workload:
    """Adapters of equal rank and rate; constant lengths, as in Figure A.13."""
    members = [packer.Adapter(f"a{i}", rank, rate / adapters) for i in range(adapters)]
    return Workload(members, Lengths.constant(INPUT), Lengths.constant(OUTPUT))


def throughput(system: System, adapters: int, slots: int, seed: int, rate: float = SATURATING) -> float:
    """Tokens per second of a saturated server; 0 if it does not start."""
    cluster = Cluster.of(packer.load_profile(PROFILE), 1, max_loras=slots, max_lora_rank=RANK)
    run = packer.simulate_cluster(fleet(adapters, rate), cluster, system, duration_s=RUN_S, seed=seed)
    return run.total_token_throughput


def pooled(adapters: int, seed: int, **changes: str) -> float:
    """S-LoRA."""
    return throughput(replace(load_system("s-lora"), **changes), adapters, adapters, seed)  # type: ignore[arg-type]


def reserved(adapters: int, seed: int) -> float:
    """The same engine and kernel with slots, at the best number of them."""
    how = replace(load_system("s-lora-no-unify"), kernel=load_system("s-lora").kernel)
    return max(throughput(how, adapters, slots, seed) for slots in SLOTS if slots <= adapters)


def memory_rows(seeds: int) -> list[Row]:
    """Figure A.13: throughput over the number of adapters."""
    by_pool = {n: of_seeds(lambda k, n=n: pooled(n, k), seeds) for n in ADAPTERS}
    by_slots = {n: of_seeds(lambda k, n=n: reserved(n, k), seeds) for n in ADAPTERS}
    first, last = ADAPTERS[0], ADAPTERS[-1]

    def loss(of: dict[int, list[float]]) -> float:
        return 100.0 * (1.0 - mean(of[last]) / mean(of[first]))

    text = "; ".join(f"{n}: {shown(by_pool[n], 0)} / {shown(by_slots[n], 0)}" for n in ADAPTERS)
    middle = 100.0 * (1.0 - mean(by_pool[128]) / mean(by_pool[64]))
    end = 100.0 * (1.0 - mean(by_pool[384]) / mean(by_pool[256]))
    return [
        Row("Fig. A.13: tok/s of a saturated server by adapters, pool / slots", "curves unreadable", text),
        Row(
            f"Fig. A.13: throughput lost from {first} to {last} adapters, pool / slots, %",
            "S-LoRA's loss flattens, vLLM's is steeper",
            f"{loss(by_pool):.1f} / {loss(by_slots):.1f}",
            "pool < slots",
            loss(by_pool) < loss(by_slots),
        ),
        Row(
            "Fig. A.13: loss of the pool from 64 to 128, from 256 to 384 adapters, %",
            "flattens",
            f"{middle:.1f}, {end:.1f}",
        ),
    ]


def variant_rows(seeds: int) -> list[Row]:
    """What the parameters of the engine do, where papers disagree."""
    n = 256
    changes: dict[str, dict[str, str]] = {
        "as S-LoRA's code: a look at the queue every 10 steps": {},
        "every step (CaraServe's description)": {"engine": "lightllm:max_wait_tokens=1"},
        "adapter clustering, 32 adapters": {"engine": "lightllm:batch_num_adapters=32"},
        "prefetch": {"loading": "prefetch"},
    }
    return [
        Row(
            f"effect at {n} adapters, tok/s: {name}",
            "–",
            shown(of_seeds(lambda k, given=given: pooled(n, k, **given), seeds), 0),
        )
        for name, given in changes.items()
    ]


def scaling_rows(seeds: int) -> list[Row]:
    """From few to many adapters of rank 8 below saturation: adapters in host memory cost little."""

    def served(adapters: int, seed: int) -> float:
        members: Sequence[packer.Adapter] = fleet(adapters, 8.0, 8).adapters
        own = Workload(members, Lengths.gamma(260.0, 0.6), Lengths.gamma(260.0, 0.6))
        cluster = Cluster.of(packer.load_profile(PROFILE), 1, max_loras=64, max_lora_rank=8)
        run = packer.simulate_cluster(own, cluster, "s-lora", duration_s=300.0, seed=seed)
        return run.request_throughput

    few, many = (of_seeds(lambda k, n=n: served(n, k), seeds) for n in (5, 2000))
    lost = 100.0 * (1.0 - mean(many) / mean(few))
    return [
        Row(
            "5 to 2,000 adapters of rank 8 at 8 req/s: throughput lost, %",
            "not quoted: the table could not be verified",
            f"{lost:.1f} ({shown(few)} → {shown(many)} req/s)",
        )
    ]


def section(seeds: int) -> Section:
    """The whole comparison."""
    return Section(
        "slora",
        "S-LoRA: a pool for KV cache and adapters",
        "arXiv 2602.24044, Figure A.13; mechanism from S-LoRA's public code",
        CONSTANTS,
        [*memory_rows(seeds), *variant_rows(seeds), *scaling_rows(seeds)],
        (
            "Pool and slots differ in memory and in nothing else: the same LightLLM engine, kernel law, loads. Slots "
            "run with the number among 16, 32, 64 and 96 that serves most.",
            "The paper measured Llama-2-7B; the calibrated profile is that of Llama 3.1 8B on the H100.",
        ),
        ("s-lora", "s-lora-no-unify"),
    )


CONSTANTS = (
    Constant("adapters and requests", "rank 32; 250 input and 231 output tokens", "T"),
    Constant("engine", "LightLLM: prefills alone, a look at the queue every 10 steps, admission by peak", "P"),
    Constant("server", "shipped profile of Llama 3.1 8B on an H100 with 64 GB", "F", "to runs of vLLM"),
    Constant("kernel", "MBGMV, time per rank from the data sheet", "A", "S-LoRA on this GPU is not published"),
    Constant("load", "40 req/s over all adapters", "A", "saturates every server"),
)  # fmt: skip
