"""Servers that share a host: start commands of vLLM and SGLang as a shell script and as JSON, and Docker Compose.

SGLang's slots (sglang/srt/lora/mem_pool.py) are those of docs/how-to/export.md. A proposed pool in pages of ranks
(sgl-project/sglang, pull request 31305) is not modelled.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from functools import partial

from packer.export import quoting, templates
from packer.export.servers import ExportedServer, Options, host_port
from packer.export.sources import vllm_path

Servers = tuple[ExportedServer, ...]


def compose(servers: Servers, options: Options) -> dict[str, str]:
    """`compose.yaml` (compose-spec): a service per server with its own GPU; adapters are in `./adapters`."""
    text = templates.render("compose.yaml", servers=list(on_one_host(servers, options)), options=options)
    return {"compose.yaml": text}


def on_one_host(servers: Servers, options: Options) -> Iterator[tuple[ExportedServer, int, list[str]]]:
    """Each server with its port and its GPUs on a host that all of them share."""
    first = 0
    for server in servers:
        yield server, host_port(server.index, options), [str(first + k) for k in range(server.bin.gpus)]
        first += server.bin.gpus


def sglang_command(server: ExportedServer, port: int) -> list[str]:
    """The command line of one server; raises `IncompatibleError` if it can't read the source of an adapter."""
    engine = server.bin.profile.engine
    flags: dict[str, object] = {
        "enable-metrics": True,
        "enable-mixed-chunk": True,  # mixes decodes and prefills in a step, like the twin
        **({"enable-lora": True} if server.modules else {}),
        "model-path": server.model,
        "host": "0.0.0.0",
        "port": port,
        "context-length": engine.max_model_len,
        "chunked-prefill-size": engine.max_num_batched_tokens,
        "max-running-requests": engine.max_num_seqs,
        "mem-fraction-static": engine.gpu_memory_utilization,
        "dtype": engine.dtype,
        "tp-size": engine.tensor_parallel_size,
        "page-size": engine.block_size,
    }
    if engine.quantization:
        flags["quantization"] = engine.quantization
    if cache := engine.kv_cache_dtype:
        flags["kv-cache-dtype"] = "fp8_e4m3" if cache == "fp8" else cache
    if engine.prefix_caching is False:
        flags["disable-radix-cache"] = True
    if server.modules:
        slots = server.bin.max_loras + bool(server.base)
        flags["max-loras-per-batch"] = slots
        flags["max-lora-rank"] = server.bin.max_lora_rank
        flags["max-loaded-loras"] = max(server.max_cpu_loras, slots, len(server.modules))
        paths = {item.name: vllm_path(item.name, item.source) for item in server.modules}
        modules = ({"lora_name": name, "lora_path": path, "pinned": False} for name, path in paths.items())
        flags["lora-paths"] = [quoting.json_text(module) for module in modules]
    return ["python3", "-m", "sglang.launch_server", *quoting.words(flags)]


def scripts(servers: Servers, options: Options, command: Callable[[ExportedServer, int], list[str]]) -> dict[str, str]:
    """`start.sh` and `args.json` of any engine; `command`: (server, port) → command line."""
    cases, arguments = [], []
    for server, port, gpus in on_one_host(servers, options):
        devices, line = ",".join(gpus), command(server, port)
        cases.append((server, port, devices, shlex.join(line)))
        known = {"server": server.name, "profile": server.bin.profile.label, "port": port}
        arguments.append({**known, "env": {server.maker.variable: devices}, "command": line})
    variables = sorted({server.maker.variable for server in servers})
    script = templates.render("start.sh", servers=cases, variables=" ".join(variables))
    return {"start.sh": script, "args.json": quoting.json_text(arguments, indent=2) + "\n"}


vllm, sglang = partial(scripts, command=ExportedServer.command), partial(scripts, command=sglang_command)  # SGLang 0.5.
