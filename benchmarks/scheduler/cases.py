"""Random cases for `vllm_side.py`: a server, and requests with prompts that begin alike, priorities and kept drafts.

    python -m benchmarks.scheduler.cases FIRST END OUT.json [prefix] [async] [tight] [priority] [windows] [METHOD]

METHOD: draft_model or eagle. `tight`: the KV cache holds few requests. `windows`: one of several groups of layers
keeps all tokens, the others those in a window; the KV cache is as large for each group. Ids of blocks stand for their
content and all before it.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

LAW = {"base": 0.01, "token": 2e-5}
"""s of a step, and of each of its tokens."""
MAX_MODEL_LEN = 2048
LONGEST = 2000
METHODS = ("draft_model", "eagle")


def server(draw: random.Random, words: list[str]) -> dict[str, Any]:
    """Settings of the engine."""
    size = draw.choice([16, 32])
    least = MAX_MODEL_LEN // size + 4
    blocks = [least, 3 * least] if "tight" in words else [least, 3 * least, 20 * least, 200 * least]
    engine: dict[str, Any] = {
        "max_model_len": MAX_MODEL_LEN, "block_size": size, "blocks": draw.choice(blocks),
        "max_num_seqs": draw.choice([8, 64, 256]), "max_num_batched_tokens": draw.choice([320, 512, 2048]),
        "max_loras": draw.choice([1, 2, 4, 16]), "prefix_caching": "prefix" in words,
        "async_scheduling": "async" in words, "scheduling_policy": "priority" if "priority" in words else "fcfs",
    }  # fmt: skip
    if "windows" in words:
        engine |= {"window": draw.choice([128, 256, 512]), "groups": draw.choice([2, 4, 7])}
        engine["blocks"] = draw.choice([1, 2, 4]) * least
    method = next((word for word in METHODS if word in words), None)
    if method:
        engine["method"], engine["num_speculative_tokens"] = method, draw.choice([1, 2, 3, 5])
    engine["max_num_batched_tokens"] = max(engine["max_num_batched_tokens"], engine["max_num_seqs"])
    return engine


def case(seed: int, words: list[str]) -> dict[str, Any]:
    """One case; columns `time`, `adapter`, `prompt`, `output`, `priority` and `blocks` by request."""
    draw = random.Random(f"{seed} {sorted(words)}")
    engine = server(draw, words)
    size, adapters = engine["block_size"], draw.choice([1, 3, 8, 20])
    rate, mean_prompt = draw.choice([2, 8, 30, 100]), 800 if "tight" in words else draw.choice([30, 200, 800])
    mean_output, fresh = draw.choice([10, 60, 250]), iter(range(10**9))
    heads = [[next(fresh) for _ in range(draw.choice([0, 1, 7, 30]))] for _ in range(adapters)]
    rows: list[tuple[float, int, int, int, int, list[int]]] = []
    for _ in range(draw.choice([40, 80, 120])):
        time_s = round((rows[-1][0] if rows else 0.0) + draw.expovariate(rate), 6)
        output = max(1, min(600, int(draw.gammavariate(1.2, mean_output / 1.2))))
        new = max(1, min(1000, int(draw.gammavariate(1.2, mean_prompt / 1.2))))
        adapter = draw.randrange(adapters)
        ids, prompt = heads[adapter] if engine["prefix_caching"] else [], new
        if engine["prefix_caching"] and rows and draw.random() < 0.4:  # the prompt of another one, and more
            _, adapter, before, _, _, ids = draw.choice(rows)
            ids = ids[: before // size]
        prompt = min(len(ids) * size + new, LONGEST - output)
        if draw.random() < 0.3 and prompt >= size:
            prompt -= prompt % size - (draw.random() < 0.5)  # a whole number of blocks, or a token more
        total = (prompt + output) // size
        ids = ids[: prompt // size]
        ids = ids + [next(fresh) for _ in range(total - len(ids))]
        rows.append((time_s, adapter, prompt, output, draw.choice([0, 0, 1, 5, -1]), ids))
    names = ("time", "adapter", "prompt", "output", "priority", "blocks")
    out: dict[str, Any] = {"seed": seed, "engine": engine, "law": LAW}
    out |= {name: [row[i] for row in rows] for i, name in enumerate(names)}
    if "num_speculative_tokens" in engine:
        out["acceptance"] = [draw.choice([0.0, 0.4, 0.8, 1.0]) for _ in range(adapters)]
    return out


if __name__ == "__main__":
    first, end, path, *words = sys.argv[1:]
    with open(path, "w") as file:
        json.dump([case(seed, words) for seed in range(int(first), int(end))], file)
