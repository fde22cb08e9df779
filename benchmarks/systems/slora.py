"""S-LoRA: one pool for KV cache and adapters, against memory reserved for adapters."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from rows import Constant, Row, Section, mean, of_seeds, shown

import packer
from packer.cluster import Cluster
from packer.lengths import Lengths
from packer.profile import EngineSpec, GpuSpec, LatencySpec, LoadingSpec, MemorySpec, ModelSpec, Profile
from packer.twin.cluster.result import ClusterSimulation
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
        "without prefetch": {"loading": "blocking"},
    }
    return [
        Row(
            f"effect at {n} adapters, tok/s: {name}",
            "–",
            shown(of_seeds(lambda k, given=given: pooled(n, k, **given), seeds), 0),
        )
        for name, given in changes.items()
    ]


@dataclass(frozen=True)
class Setting:
    """A setting of S-LoRA's own suite on an A100 with 80 GB: LoRA on q, k, v, o; pool in cells, offered req/s.

    `base_ms`: a decode step without KV cache and adapters, fitted to the first figure of `published`, which has
    req/s by the number of adapters.
    """

    name: str
    layers: int
    hidden: int
    weights_bytes: float
    cells: int
    ranks: tuple[int, ...]
    rate: float
    base_ms: float
    published: dict[int, float]

    def cluster(self, slots: int) -> Cluster:
        """One server; `slots`: where memory for adapters is reserved."""
        kv = 4.0 * self.layers * self.hidden
        law = {
            "base_ms": self.base_ms,
            "per_kv_token_ms": 1e3 * kv / (BANDWIDTH_SHARE * GPU_BYTES_S),
            "per_prefill_token_ms": 1e3 * self.weights_bytes / (FLOP_SHARE * GPU_FLOPS),
        }
        profile = Profile(
            f"a100-80gb/{self.name}",
            ModelSpec(self.name, self.weights_bytes, kv, 4.0 * kv),
            GpuSpec("NVIDIA A100 80GB", 80e9),
            EngineSpec("lightllm", "0", 2048, 2048, 1024, block_size=1),
            MemorySpec(self.cells * kv, 0.0, 4.0 * kv, 1024, "unified"),
            LatencySpec("linear", law),
            LoadingSpec(0.0, 1e3 * 4.0 * kv / LINK_BYTES_S),
        )
        return Cluster.of(profile, 1, max_loras=slots, max_lora_rank=64)

    def run(
        self, adapters: int, seed: int, system: System | str = "s-lora", slots: int = 1
    ) -> ClusterSimulation:
        """Five minutes; input and output lengths uniform on [8, 512)."""
        lengths = Lengths.empirical(np.arange(8, 512))
        ranks = [self.ranks[i % len(self.ranks)] for i in range(adapters)]
        members = [packer.Adapter(f"a{i}", rank, self.rate / adapters) for i, rank in enumerate(ranks)]
        fleet = Workload(members, lengths, lengths, length_correlation=0.0)
        return packer.simulate_cluster(fleet, self.cluster(slots), system, duration_s=300.0, seed=seed)

    def served(self, adapters: int, seed: int) -> float:
        """Requests per second of S-LoRA."""
        return self.run(adapters, seed).request_throughput


GPU_BYTES_S, GPU_FLOPS, LINK_BYTES_S = 2.039e12, 312e12, 12e9
BANDWIDTH_SHARE, FLOP_SHARE = 0.7, 0.5
SMALL = ("llama-7b", 32, 4096, 13.5e9, 125_000)
SETTINGS = {
    "S1": Setting(*SMALL, (8,), 10.0, 33.0, {5: 8.05, 100: 7.99, 1000: 7.64, 2000: 7.61}),
    "S2": Setting(*SMALL, (64, 32, 16, 8), 10.0, 33.0, {5: 7.48, 100: 7.29, 1000: 6.69, 2000: 6.71}),
    "S4": Setting(
        "llama-13b", 40, 5120, 26e9, 65_000, (64, 32, 16), 6.0, 40.5, {2: 4.49, 100: 4.28, 1000: 3.96}
    ),
}
FITTED = {"S1": "base fitted to n = 5", "S2": "base of S1, held out", "S4": "base fitted to n = 2"}
PER_REQUEST = (
    "a step is no slower here with more distinct adapters: a kernel takes time by the ranks of requests"
)


def own_rows(seeds: int) -> list[Row]:
    """S-LoRA's own table: throughput from few to thousands of adapters."""
    rows = []
    for name, setting in SETTINGS.items():
        means = {
            n: mean(of_seeds(lambda k, s=setting, n=n: s.served(n, k), seeds)) for n in setting.published
        }
        within = all(abs(means[n] / setting.published[n] - 1.0) <= 0.1 for n in means)
        rows.append(
            Row(
                f"{name} on an A100: req/s with {' / '.join(f'{n:,}' for n in means)} adapters",
                " / ".join(f"{value:.2f}" for value in setting.published.values()),
                " / ".join(f"{value:.2f}" for value in means.values()),
                "each within 10 %",
                within,
                FITTED[name] + ("" if within else "; " + PER_REQUEST),
            )
        )
        if name == "S1":
            lost = 100.0 * (1.0 - means[2000] / means[5])
            rows.append(
                Row(
                    "S1: throughput lost from 5 to 2,000 adapters, %",
                    "5.5",
                    f"{lost:.1f}",
                    "below 10",
                    lost < 10.0,
                    "its loads are prefetched beside decodes, and each request takes the same time by its rank",
                )
            )
    return rows


def variant_order_rows(seeds: int) -> list[Row]:
    """S-LoRA beside its variants without the pool, and with early abort."""
    wide, few = SETTINGS["S4"], SETTINGS["S1"]
    pool = mean(of_seeds(lambda k: wide.served(100, k), seeds))
    slots = max(
        mean(of_seeds(lambda k, n=n: wide.run(100, k, "s-lora-no-unify", n).request_throughput, seeds))
        for n in SLOTS
    )
    limit = {"ttft_ms": 6000.0}

    def kept(seed: int, abort: bool) -> float:
        engine = "lightllm:max_wait_tokens=10" + (",abort_after_s=6" if abort else "")
        run = few.run(100, seed, replace(load_system("s-lora"), engine=engine))
        assert run.raw is not None
        ttft_s = run.raw.first_s - run.raw.requests.time_s
        return 100.0 * float(np.mean(ttft_s <= limit["ttft_ms"] * 1e-3))

    plain, abort = (of_seeds(lambda k, a=a: kept(k, a), seeds) for a in (False, True))
    return [
        Row(
            "S4, 100 adapters: req/s of S-LoRA / without the pool",
            "noticeably higher with it",
            f"{pool:.2f} / {slots:.2f}",
            "pool > no-unify-mem",
            pool > slots,
            "BGMV and the best of 16, 32, 64, 96 slots of rank 64 without the pool",
        ),
        Row(
            "S1, 100 adapters, overloaded: first token within 6 s, %, early abort / first come, first served",
            "its purpose; curves unreadable",
            f"{shown(abort, 0)} / {shown(plain, 0)}",
            "early abort higher",
            mean(abort) > mean(plain),
        ),
    ]


def section(seeds: int) -> Section:
    """The whole comparison."""
    return Section(
        "slora",
        "S-LoRA: a pool for KV cache and adapters",
        "arXiv 2602.24044, Figure A.13; arXiv 2311.03285 by its authors' public summary, and their code",
        CONSTANTS,
        [*memory_rows(seeds), *variant_rows(seeds), *own_rows(seeds), *variant_order_rows(seeds)],
        (
            "Pool and slots differ in memory and in nothing else: the same LightLLM engine, kernel law, loads. Slots "
            "run with the number among 16, 32, 64 and 96 that serves most.",
            "Figure A.13 measured Llama-2-7B; the calibrated profile is that of Llama 3.1 8B on the H100.",
            "S-LoRA's own baselines are not simulated: vLLM-packed (2.04 req/s at 5 adapters in S1, out of memory "
            "beyond) is a process for each merged model under MPS, HuggingFace PEFT (0.88 at 5, 0.25 at 100) has one "
            "adapter in a batch.",
        ),
    )


CONSTANTS = (
    Constant("adapters and requests", "rank 32; 250 input and 231 output tokens", "T"),
    Constant("engine", "LightLLM: prefills alone, a look at the queue every 10 steps, admission by peak", "P"),
    Constant("server", "shipped profile of Llama 3.1 8B on an H100 with 64 GB", "F", "to runs of vLLM"),
    Constant("S1, S2, S4", "125,000 cells, 65,000 in S4; 10 and 6 req/s for 5 min; lengths uniform on [8, 512)", "P"),
    Constant("A100, 7B and 13B: decode step", "33 and 40.5 ms, without KV cache", "F", "first figures of S1 and S4"),
    Constant("A100: KV cache", "read at 70 % of 2.04 TB/s", "A"),
    Constant("A100: prefill, link", "half of 312 TFLOPS; 12 GB/s", "A"),
    Constant("kernel", "MBGMV, time per rank from the data sheet", "A", "S-LoRA on this GPU is not published"),
    Constant("load", "40 req/s over all adapters", "A", "saturates every server"),
)  # fmt: skip
