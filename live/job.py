"""What the load generator sends, and the file that carries it to the process that does."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from packer.arrival import RequestTrace
from packer.blocks import Blocks


@dataclass(frozen=True)
class LoadJob:
    """What to send.

    `url`: of the server, without a path and without a key.
    `models`: model name in the request, for each adapter index of the trace.
    `requests`: when, which adapter, how long.
    `duration_s`: the run ends then, and unfinished requests are dropped.
    `drain_s`: seconds to wait after `duration_s` for unfinished requests; the run's duration grows accordingly.
    `token_ids`: prompts are random token ids in [low, high[; those of blocks with one id are the same.
    `max_outstanding`: requests beyond it are refused by the client.
    `stall_s`: nothing came for so long while requests were outstanding: the server hangs, the run ends.
    `failures_to_stop`: so many failed requests in a row, none completed in between: the run ends.
    `metrics_interval_s`: time between looks at /metrics; 0 looks at the start and the end only.
    `cores`: CPU cores to run on; empty means any.
    """

    url: str
    models: tuple[str, ...]
    requests: RequestTrace
    duration_s: float
    drain_s: float = 0.0
    token_ids: tuple[int, int] = (1000, 9000)
    seed: int = 0
    max_outstanding: int = 1_000_000
    stall_s: float = 60.0
    failures_to_stop: int = 50
    metrics_interval_s: float = 1.0
    cores: tuple[int, ...] = ()


def bodies_of(job: LoadJob) -> list[bytes]:
    """The JSON of every request, made before the run so that sending costs little."""
    rng = np.random.default_rng(job.seed)
    low, high = job.token_ids
    trace = job.requests
    bodies = []
    for k, (adapter, n_in, n_out) in enumerate(
        zip(trace.adapter.tolist(), trace.input_tokens.tolist(), trace.output_tokens.tolist(), strict=True)
    ):
        prompt = rng.integers(low, high, n_in)
        if (blocks := trace.blocks) is not None:
            for place, i in enumerate(blocks.ids[blocks.starts[k] : blocks.starts[k + 1]].tolist()):
                here = prompt[
                    place * blocks.tokens : (place + 1) * blocks.tokens
                ]  # the same wherever this id is
                here[:] = np.random.default_rng((job.seed, i)).integers(low, high, blocks.tokens)[: len(here)]
        body = {
            "model": job.models[adapter],
            "prompt": prompt.tolist(),
            "max_tokens": n_out,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        bodies.append(json.dumps(body, separators=(",", ":")).encode())
    return bodies


_COLUMNS = ("time_s", "adapter", "input_tokens", "output_tokens")


def write_job(job: LoadJob, path: Path) -> None:
    """Write a job for the client process."""
    trace = job.requests
    requests = {name: getattr(trace, name).tolist() for name in _COLUMNS} | {"end_s": trace.end_s}
    if (blocks := trace.blocks) is not None:
        requests["blocks"] = [blocks.starts.tolist(), blocks.ids.tolist(), blocks.tokens]
    data = {each.name: getattr(job, each.name) for each in fields(job)} | {"requests": requests}
    path.write_text(json.dumps(data))


def read_job(path: Path) -> LoadJob:
    """Read what `write_job` wrote."""
    data = json.loads(path.read_text())
    requests = data.pop("requests")
    times, *counts = (requests[name] for name in _COLUMNS)
    columns = (np.array(each, dtype=np.int64) for each in counts)
    blocks = None
    if "blocks" in requests:
        starts, ids, tokens = requests["blocks"]
        blocks = Blocks(np.array(starts, dtype=np.int64), np.array(ids, dtype=np.int64), tokens)
    trace = RequestTrace(np.array(times, dtype=np.float64), *columns, blocks=blocks, end_s=requests["end_s"])
    for key in ("models", "token_ids", "cores"):
        data[key] = tuple(data[key])
    return LoadJob(requests=trace, **data)
