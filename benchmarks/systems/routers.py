"""Live routers on four servers: NVIDIA Dynamo's hashing, dLoRA, Punica and vLLM's own, side by side."""

from __future__ import annotations

from mainpaper import LLAMA, Scenario
from rows import Constant, Row, Section, mean, of_seeds, shown, table

import packer
from packer.cluster import Cluster
from packer.twin.run import Run

SYSTEMS = {
    "vllm": "vLLM behind fewest requests",
    "round-robin": "vLLM behind round robin",
    "production-stack": "vLLM production stack: in turn",
    "affinity": "vLLM behind adapter affinity",
    "hrw": "rendezvous hashing",
    "dynamo": "NVIDIA Dynamo: hashing, replicas by load",
    "dynamo-mcf": "NVIDIA Dynamo: min-cost flow, replicas by load",
    "ray-serve": "Ray Serve: multiplexing",
    "dlora": "dLoRA: placement, dispatcher, migration, merged batches; no front end",
    "punica": "Punica",
    "llm-d": "Gateway API inference extension (llm-d): affinity, queue and KV scores",
    "aibrix": "AIBrix: LoRA affinity",
    "aibrix-least-latency": "AIBrix: least latency",
    "aibrix-prefix-cache": "AIBrix: prefix cache",
    "aibrix-model-adapter": "AIBrix: ModelAdapters, each on one server",
    "packer": "the placement of packer's latency plan",
}
FLEET = Scenario(LLAMA, "mixed", "8–32", (160,))
SERVERS, SLOTS, RUN_S = 4, 32, 400.0


def run(system: str, seed: int) -> Run:
    """The fleet on four servers."""
    fleet = FLEET.fleet(FLEET.sizes[0], seed)
    cluster = Cluster.of(packer.load_profile(LLAMA), SERVERS, max_loras=SLOTS, max_lora_rank=32)
    slo = {"ttft_ms": 2000.0, "tpot_ms": 100.0}
    if system == "packer":
        cluster = packer.solve(fleet, packer.load_profile(LLAMA), "latency", max_gpus=SERVERS, verify=False).cluster()
    return packer.simulate_cluster(fleet, cluster, system, duration_s=RUN_S, seed=seed, slo=slo)


def section(seeds: int) -> Section:
    """The comparison."""
    found = {name: of_seeds(lambda k, s=name: run(s, k), seeds) for name in SYSTEMS}
    cells = [
        [
            f"`{name}`: {text}",
            shown([each.mean_ttft_ms for each in found[name]], 0),
            shown([each.mean_tpot_ms for each in found[name]], 1),
            shown([100.0 * each.slo_attainment for each in found[name]], 1),
            shown([each.hit_rate for each in found[name]], 2),
        ]
        for name, text in SYSTEMS.items()
    ]
    hits = {name: mean([each.hit_rate for each in of]) for name, of in found.items()}
    return Section(
        "routers",
        "Dynamo, dLoRA, Punica and vLLM: routers on four servers",
        "public code and pull requests of NVIDIA Dynamo; dLoRA, OSDI 2024; Punica, MLSys 2024",
        CONSTANTS,
        [
            Row(
                "hashing keeps adapters on few servers: admissions that find theirs on the GPU",
                "its purpose",
                ", ".join(f"{name} {hits[name]:.2f}" for name in ("hrw", "vllm", "round-robin")),
                "hrw above vllm and round-robin",
                hits["hrw"] > max(hits["vllm"], hits["round-robin"]),
            )
        ],
        (
            "None of these systems published results for such a fleet: a comparison, not a reproduction.",
            "Punica runs at most 32 requests at once, which this fleet exceeds.",
        ),
        tables=[
            table("160 adapters on four servers", ["system", "TTFT, ms", "TPOT, ms", "SLO kept, %", "hits"], cells)
        ],
    )


CONSTANTS = (
    Constant("fleet", "160 adapters of Llama 3.1 8B, mixed rates, ranks 8, 16, 32, Poisson", "A"),
    Constant("servers", f"4 H100, {SLOTS} slots of rank 32 (the plan chooses its own)", "A"),
    Constant("SLO", "TTFT 2,000 ms and TPOT 100 ms", "A"),
)
