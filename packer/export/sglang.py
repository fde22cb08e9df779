"""Start commands of SGLang (0.5): a shell script that starts one server or all of them, and the same as JSON.

A plan for SGLang is one whose profile describes it (`packer profiles estimate --engine sglang`). The memory of its
adapters is that of `--max-loras-per-batch` slots of `--max-lora-rank` (sglang/srt/lora/mem_pool.py), as vLLM's; a
pool in pages of ranks is proposed (sgl-project/sglang, pull request 31305) and not modelled.
"""

from __future__ import annotations

from packer.export import quoting
from packer.export.servers import ExportedServer, Options, words
from packer.export.sources import vllm_path
from packer.export.vllm import scripts


def render(servers: tuple[ExportedServer, ...], options: Options) -> dict[str, str]:
    """`start.sh` and `args.json`."""
    return scripts(servers, options, command)


def command(server: ExportedServer, port: int) -> list[str]:
    """The command line of one server.

    Raises `IncompatibleError`: the engine can't read the source of an adapter.
    """
    engine = server.bin.profile.engine
    flags: dict[str, object] = {
        "enable-metrics": True,
        "enable-mixed-chunk": True,  # decodes beside prefills in one step, as in the twin
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
    if server.modules:
        flags |= {
            "max-loras-per-batch": server.bin.max_loras,
            "max-lora-rank": server.bin.max_lora_rank,
            "max-loaded-loras": server.max_cpu_loras,
        }
    modules = [
        quoting.json_text(
            {"lora_name": item.name, "lora_path": vllm_path(item.name, item.source), "pinned": False}
        )
        for item in server.modules
    ]
    return [
        "python3",
        "-m",
        "sglang.launch_server",
        *words(flags),
        *(["--lora-paths", *modules] if modules else []),
    ]
