"""KServe 0.20: an LLMInferenceService for each server, with its adapters (serving.kserve.io/v1alpha2).

The controller downloads or mounts the adapters and sets vLLM's LoRA flags from `spec.model.lora`. Other flags are
passed in VLLM_ADDITIONAL_ARGS, which KServe's start script expands in a shell. KServe's routes by its header of the
model, of 8 matches for each name, fit few adapters: the Gateway API takes 64 matches in a rule, so that a service with
more adapters would get no route at all.
"""

from __future__ import annotations

import re
import shlex

from packer.errors import IncompatibleError, shown
from packer.export import quoting, templates
from packer.export.servers import ExportedServer, Module, Options, base_by_its_name
from packer.export.sources import address, parsed

_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@+-]*", re.ASCII)
_MOST_ROUTED = 7  # Most adapters of a service whose routes by header fit (kserve 0.20, config/llmisvcconfig).
_LORA_FLAGS = {"enable-lora", "max-loras", "max-lora-rank", "max-cpu-loras", "tensor-parallel-size"}


def render(servers: tuple[ExportedServer, ...], options: Options) -> dict[str, str]:
    """`services.yaml`, for `kubectl apply -f`."""
    base_by_its_name(servers, "KServe")
    found = []
    for server in servers:
        _check_names(server)
        uris = {item.name: _adapter_uri(item, options) for item in server.modules}
        flags = quoting.words({name: value for name, value in server.settings().items() if name not in _LORA_FLAGS})
        limit = server.bin.profile.engine.max_cpu_loras
        host = max(server.bin.max_loras, 2 * (len(server.modules) if limit is None else limit))
        found.append((server, _model_uri(server.model), uris, host, shlex.join(flags)))
    return {"services.yaml": templates.render("kserve.yaml", servers=found, options=options, most=_MOST_ROUTED)}


def _model_uri(model: str) -> str:
    kind, rest = parsed(model)
    if kind == "huggingface":
        return f"hf://{rest}"
    if kind == "s3" or model.startswith(("pvc://", "oci://")):
        return model
    rule = "Expected the base model to be what KServe loads, a Hugging Face repository, s3:// or pvc://"
    raise IncompatibleError(f"{rule}, got {shown(model)}: give --model.")


def _adapter_uri(item: Module, options: Options) -> str:
    expected = "a path in the claim, a Hugging Face repository or s3://"
    found = address(item.name, item.source, {"huggingface": "hf://", "s3": "s3://", "path": ""}, expected)
    folder = options.adapters_dir.rstrip("/") + "/"
    return f"pvc://{options.adapters_claim}/{found.removeprefix(folder)}" if found.startswith("/") else found


def _check_names(server: ExportedServer) -> None:
    """Raise `IncompatibleError` if a name is not safe in KServe's shell, or two names map to one folder of KServe."""
    names = [item.name for item in server.modules]
    for name in names:
        if not _SAFE.fullmatch(name):
            rule = "Expected names of adapters that KServe's start script keeps, of letters, digits and ._/:@+-,"
            raise IncompatibleError(f"{rule} got {shown(name)}.")
    for item in server.modules:
        if parsed(item.source)[0] == "path" and quoting.dns_name(item.name) != item.name:
            raise IncompatibleError(
                "Expected names of small letters, digits and '-' for adapters on a claim, whose volumes KServe calls "
                f"by them, got {shown(item.name)}: rename it, or give it a repository or s3:// with --sources."
            )
    if pair := quoting.alike(names, _folder):
        rule = f"KServe puts the adapters {shown(pair[0])} and {shown(pair[1])} into one folder,"
        raise IncompatibleError(f"{rule} {_folder(pair[0])!r}: rename one.")


def _folder(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9._-]", "-", name)
