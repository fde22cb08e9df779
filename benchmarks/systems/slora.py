"""S-LoRA: one pool for KV cache and adapters, against memory reserved for adapters."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from rows import Constant, Row, Section, mean, near, of_seeds, shown

import packer
from packer.arrival import Arrivals, RequestTrace
from packer.cluster import Cluster
from packer.engine_spec import EngineSpec
from packer.lengths import Lengths
from packer.profile import GpuSpec, LatencySpec, LoadingSpec, MemorySpec, ModelSpec, Profile
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
        Row(
            "Fig. A.13: tok/s of a saturated server by adapters, pool / slots",
            "curves unreadable",
            text,
            basis="untestable",
        ),
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
            "the second smaller",
            end < middle,
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


GPU_BYTES_S, GPU_FLOPS, LINK_BYTES_S = 2.039e12, 312e12, 12e9
KV_SHARE, FLOP_SHARE = 0.7, 0.5
RANK_READS = 1.9
"""Time of a request's rank in a step, in that of reading its weights at the GPU's bandwidth."""
LOAD_BASE_MS, LOAD_COPIES = 9.0, 2
"""The code copies each layer's A and B to the GPU twice: once to keep A, once to keep B."""
RANK_CELLS = 4
"""Cells of a unit of rank: LoRA on q, k, v, o."""
SPAN_S = 1200.0
"""Time of a simulation: by then all requests of a run are finished."""


@dataclass(frozen=True)
class Setting:
    """A setting of S-LoRA's own suite on an A100 with 80 GB.

    `cells`: of the pool. `base_ms`: a decode step without KV cache and adapters.
    """

    layers: int
    hidden: int
    weights_bytes: float
    cells: int
    ranks: tuple[int, ...]
    base_ms: float

    def cluster(self, slots: int, more_ms: float = 0.0) -> Cluster:
        """One server; `slots`: where memory for adapters is reserved; `more_ms`: that a load takes longer."""
        kv = 4.0 * self.layers * self.hidden
        law = {
            "base_ms": self.base_ms,
            "per_kv_token_ms": 1e3 * kv / (KV_SHARE * GPU_BYTES_S),
            "per_prefill_token_ms": 1e3 * self.weights_bytes / (FLOP_SHARE * GPU_FLOPS),
            "per_request_rank_ms": RANK_READS * 1e3 * RANK_CELLS * kv / GPU_BYTES_S,
        }
        profile = Profile(
            "a100-80gb/s-lora",
            ModelSpec("s-lora", self.weights_bytes, kv, RANK_CELLS * kv),
            GpuSpec("NVIDIA A100 80GB", 80e9),
            EngineSpec("lightllm", "0", 2048, 2048, 1024, block_size=1),
            MemorySpec(self.cells * kv, 0.0, RANK_CELLS * kv, 1024, "unified"),
            LatencySpec("linear", law),
            LoadingSpec(LOAD_BASE_MS + more_ms, 1e3 * LOAD_COPIES * RANK_CELLS * kv / LINK_BYTES_S),
        )
        return Cluster.of(profile, 1, max_loras=slots, max_lora_rank=64)

    def fleet(self, adapters: int, rate: float, sent_s: float) -> Workload:
        """The very requests of the authors' generator at their seed, 42; without adapters, one of no cost."""
        draw, n, m = np.random.RandomState(42), int(rate * sent_s), max(adapters, 1)
        adapter = (draw.power(1.0, n) * m).astype(np.int64)
        tokens = [draw.randint(8, 512, n).astype(np.int64) for _ in range(2)]
        times_s = np.cumsum(draw.gamma(1.0, 1.0 / rate, n))
        trace = RequestTrace(times_s, adapter, *tokens, end_s=SPAN_S)
        members = [packer.Adapter(f"a{i}", self.ranks[i % len(self.ranks)], n / SPAN_S / m) for i in range(m)]
        return Workload(members, arrivals=Arrivals("trace", trace=trace))

    def run(
        self, load: tuple[int, float, float], system: str = "s-lora", slots: int = 1, abort: bool = False,
        more_ms: float = 0.0,
    ) -> Served:  # fmt: skip
        """`load`: adapters, req/s, and for how many seconds requests are sent; `more_ms`: of each load."""
        adapters, rate, sent_s = load
        own = self if adapters else replace(self, ranks=(1,))
        cluster = own.cluster(slots, more_ms)
        if not adapters:
            cluster = without_adapters(cluster)
        how = load_system(system)
        how = replace(
            how,
            kernel=None,  # the law is the profile's
            loading="blocking" if adapters else "none",
            engine="lightllm:max_wait_tokens=10" + (",abort_after_s=6" if abort else ""),
        )
        run = packer.simulate_cluster(own.fleet(adapters, rate, sent_s), cluster, how, duration_s=SPAN_S, seed=0)
        assert run.raw is not None
        latency_s = run.raw.finish_s - run.raw.requests.time_s
        first_s = run.raw.first_s - run.raw.requests.time_s
        done = run.raw.finished
        return Served(
            float(done.sum() / np.nanmax(run.raw.finish_s)),
            float(latency_s[done].mean()),
            float(first_s[done].mean()),
            100.0 * float(np.mean(first_s <= 6.0)),
        )


@dataclass(frozen=True)
class Served:
    """As the authors' client counts: requests over the time until the last is finished; means over requests."""

    req_s: float
    latency_s: float
    first_s: float
    within_limit: float


def without_adapters(cluster: Cluster) -> Cluster:
    """The same server where LoRA costs nothing."""
    kind = cluster.kinds[0]
    law = {k: v for k, v in kind.profile.latency.coefficients.items() if k != "per_request_rank_ms"}
    profile = replace(kind.profile, latency=replace(kind.profile.latency, coefficients=law))
    return replace(cluster, kinds=(replace(kind, profile=profile),))


SMALL = (32, 4096, 13.5e9, 125_000)
S1 = Setting(*SMALL, (8,), 28.0)
S2 = Setting(*SMALL, (64, 32, 16, 8), 28.0)
S4 = Setting(40, 5120, 26e9, 65_000, (64, 32, 16), 29.4)
Published = dict[int, tuple[float, float, float]]
"""Adapters → req/s, mean latency, mean time to first token."""
TABLE: dict[str, tuple[Setting, Published]] = {
    "S1": (
        S1,
        {5: (8.05, 20.8, 0.60), 100: (7.99, 21.6, 0.62), 1000: (7.64, 25.9, 1.90), 2000: (7.61, 26.2, 2.02)},
    ),
    "S2": (
        S2,
        {5: (7.48, 29.1, 2.66), 100: (7.29, 30.7, 4.21), 1000: (6.69, 38.1, 10.5), 2000: (6.73, 37.9, 10.7)},
    ),
    "S4": (
        S4,
        {2: (4.49, 80.0, 50.5), 5: (4.43, 82.2, 54.8), 100: (4.28, 84.7, 58.6), 1000: (3.90, 98.1, 72.1)},
    ),
}
"""Two minutes at 10 req/s."""
FIGURE: dict[str, tuple[Setting, float, Published]] = {
    "S2": (S2, 10.0, {0: (9.64, 22.2, 0.92), 1: (7.74, 61.7, 29.3), 20: (7.93, 56.9, 25.8), 50: (7.84, 58.9, 28.2),
                      100: (7.74, 60.7, 30.7), 200: (7.52, 66.7, 37.2)}),
    "S4": (S4, 6.0, {0: (5.59, 25.2, 2.85), 1: (4.43, 67.6, 37.3), 100: (4.30, 71.7, 45.3), 200: (4.17, 77.6, 51.6),
                     400: (4.06, 84.1, 58.2)}),
}  # fmt: skip
"""Five minutes, at so many req/s."""
NOTES = {
    "table S1": "loads fitted to the latency with 1,000 adapters",
    "figure S2": "base fitted to the latency without adapters, time of a rank to that with one",
    "figure S4": "base fitted to the latency without adapters",
}
NEAR, LATENCY_NEAR = 0.1, 0.15
FITTED = {"table S1": (1000,), "figure S2": (0, 1), "figure S4": (0,)}
"""Numbers of adapters at which a constant was fitted to the latency."""


Runs = dict[int, Served]


def disagreement(name: str) -> str:
    """What first tokens of the figure's S2 and of the table's say of the server's rate: (r / c − 1) · T / 2 in the mean
    where r req/s are sent for T s and c are served.
    """
    if name != "figure S2":
        return ""
    cases = ((FIGURE["S2"][2], 20, 300.0), (TABLE["S2"][1], 5, 120.0))
    figure, own = (10.0 / (1.0 + 2.0 * published[n][2] / sent_s) for published, n, sent_s in cases)
    return f"; by first tokens 20 adapters of mean rank 30 get {figure:.1f} req/s there, 5 of 37 in the table {own:.1f}"


def own_row(name: str, rate: float, sent_s: float, published: Published, ours: Runs) -> list[Row]:
    """S-LoRA's own results from few to thousands of adapters: throughput, claimed, and latency, shown."""
    counts = " / ".join(f"{n:,}" for n in published)
    where = f"{name}, A100, {rate:g} req/s for {sent_s:g} s"
    fitted = FITTED.get(name, ())
    return [
        Row(
            f"{where}: req/s with {counts} adapters",
            " / ".join(f"{each[0]:.2f}" for each in published.values()),
            " / ".join(f"{each.req_s:.2f}" for each in ours.values()),
            "each within 10 %",
            all(near(ours[n].req_s, published[n][0], NEAR) for n in published),
            NOTES.get(name, "held out") + disagreement(name),
        ),
        Row(
            f"{where}: mean latency, s (first token)",
            " / ".join(f"{each[1]:.1f} ({each[2]:.1f})" for each in published.values()),
            " / ".join(f"{each.latency_s:.1f} ({each.first_s:.1f})" for each in ours.values()),
            "latencies within 15 %" + (f", without {' and '.join(map(str, fitted))} adapters" if fitted else ""),
            all(near(ours[n].latency_s, published[n][1], LATENCY_NEAR) for n in published if n not in fitted),
            NOTES.get(name, "") + disagreement(name),
        ),
    ]


def own_rows() -> list[Row]:
    """S-LoRA's own table and figure."""
    rows, lost = [], []
    for name, (setting, published) in TABLE.items():
        ours = {n: setting.run((n, 10.0, 120.0)) for n in published}
        rows += own_row(f"table {name}", 10.0, 120.0, published, ours)
        first, *_, last = published
        lost.append([100.0 * (1.0 - b / a) for a, b in (
            (published[first][0], published[last][0]), (ours[first].req_s, ours[last].req_s)
        )])  # fmt: skip
    texts = [" / ".join(f"{each[k]:.1f}" for each in lost) for k in (0, 1)]
    rows.append(
        Row(
            "table S1 / S2 / S4: req/s lost from the fewest to the most adapters, %",
            texts[0],
            texts[1],
            "S1 below 10; S1 < S2 < S4",
            lost[0][1] < min(10.0, lost[1][1]) and lost[1][1] < lost[2][1],
        )
    )
    for name, (setting, rate, published) in FIGURE.items():
        ours = {n: setting.run((n, rate, 300.0)) for n in published}
        rows += own_row(f"figure {name}", rate, 300.0, published, ours)
    return rows


NO_POOL: dict[int, tuple[int, float]] = {100: (40_000, 3.35), 400: (35_000, 2.64)}
"""Adapters → cells that the authors left for the KV cache, and their req/s."""


def variant_order_rows() -> list[Row]:
    """S-LoRA beside its variants without the pool, and with early abort."""
    pool, slots, copied = {}, {}, {}
    for n, (cells, _) in NO_POOL.items():
        pool[n] = S4.run((n, 6.0, 300.0)).req_s
        count = (S4.cells - cells) // (64 * RANK_CELLS)
        copy_ms = 1e3 * 2 * count * 64 * RANK_CELLS * 4.0 * S4.layers * S4.hidden / GPU_BYTES_S
        slots[n], copied[n] = (
            S4.run((n, 6.0, 300.0), "s-lora-no-unify", count, more_ms=ms).req_s for ms in (0.0, copy_ms)
        )
    abort, plain = (S4.run((100, 10.0, 120.0), abort=each).within_limit for each in (True, False))
    return [
        Row(
            "S4, A100, 6 req/s for 300 s: req/s with 100 / 400 adapters, without the pool",
            " / ".join(f"{req_s:.2f}" for _, req_s in NO_POOL.values()) + " (4.30 / 4.06 with it)",
            " / ".join(f"{value:.2f}" for value in slots.values())
            + f" ({' / '.join(f'{value:.2f}' for value in pool.values())} with it)",
            "each within 10 %",
            all(near(slots[n], req_s, NEAR) for n, (_, req_s) in NO_POOL.items()),
            "slots of rank 64 in the memory that the authors took from the KV cache; their variant also copies all "
            "adapters on the GPU with each load: at the GPU's bandwidth "
            + " / ".join(f"{value:.2f}" for value in copied.values())
            + " would be left",
        ),
        Row(
            "S4, A100, 6 req/s for 300 s: the pool serves more than the same server without it",
            "yes",
            " / ".join(f"{100 * (pool[n] / slots[n] - 1):.0f} %" for n in pool) + " more",
            "more, with 100 and with 400 adapters",
            all(pool[n] > slots[n] for n in pool),
        ),
        Row(
            "table S4, 100 adapters: first token within 6 s, %, early abort / first come, first served",
            "its purpose; 14 without it",
            f"{abort:.0f} / {plain:.0f}",
            "early abort higher",
            abort > plain,
        ),
    ]


def section(seeds: int) -> Section:
    """The whole comparison."""
    return Section(
        "slora",
        "S-LoRA: a pool for KV cache and adapters",
        "arXiv 2602.24044, Figure A.13; arXiv 2311.03285 by the code, commands and results in its authors' repository",
        CONSTANTS,
        [*memory_rows(seeds), *variant_rows(seeds), *own_rows(), *variant_order_rows()],
        (
            "Pool and slots differ in memory and in nothing else: the same LightLLM engine, kernel law, loads. Slots "
            "run with the number among 16, 32, 64 and 96 that serves most.",
            "Figure A.13 measured Llama-2-7B; the calibrated profile is that of Llama 3.1 8B on the H100.",
            "S1, S2 and S4 are the settings of S-LoRA's own table and figure. Its client divides the requests by the "
            "time until the last one is finished, so that even a server that keeps up has less than 10 req/s. "
            "Four numbers are fitted, each to one latency that isolates it; the other results are held out.",
            "In the figure's S2 20 adapters of mean rank 30 are hardly faster than one of rank 64, in the table's S2 "
            "5 adapters of mean rank 37 are as much faster as the law by ranks says: the two don't agree.",
            "S-LoRA's own baselines are not simulated: vLLM-packed (2.04 req/s at 5 adapters in S1, out of memory "
            "beyond) is a process for each merged model under MPS, HuggingFace PEFT (0.88 at 5, 0.25 at 100) has one "
            "adapter in a batch.",
        ),
    )


CONSTANTS = (
    Constant("adapters and requests", "rank 32; 250 input and 231 output tokens", "T"),
    Constant("engine", "LightLLM: prefills alone, a look at the queue every 10 steps, admission by peak", "P"),
    Constant("server", "shipped profile of Llama 3.1 8B on an H100 with 64 GB", "F", "to runs of vLLM"),
    Constant("S1, S2, S4: requests", "those of the authors' generator, seed 42; 10 req/s for 2 min (table)", "P"),
    Constant("S1, S2, S4: engine", "125,000 cells, 65,000 in S4; prefills up to a sixth of them; no prefetch", "P"),
    Constant("A100, 7B and 13B: decode step", "28 and 29.4 ms, without KV cache", "F", "latency without adapters"),
    Constant("A100: time of a request's rank", "1.9 × reading its weights at 2.04 TB/s", "F", "S2 with one adapter"),
    Constant("A100: a load", "9 ms", "F", "S1 with 1,000 adapters"),
    Constant("A100: bytes of a load", "twice the adapter's, at 12 GB/s", "P", "the code copies each layer twice"),
    Constant("A100: KV cache, prefill", "read at 70 % of 2.04 TB/s; half of 312 TFLOPS", "A"),
    Constant("kernel", "MBGMV, time per rank from the data sheet", "A", "S-LoRA on this GPU is not published"),
    Constant("load", "40 req/s over all adapters", "A", "saturates every server"),
)
