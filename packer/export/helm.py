"""vLLM production stack: chart values with a `modelSpec` per server, and a LoraAdapter per adapter and server.

The operator loads an adapter on the pods of its `baseModel`, which is the name of a `modelSpec`; therefore each
server has its own `modelSpec`. Resources: production-stack.vllm.ai/v1alpha1 and chart 0.1.12. The planned share,
which the chart's router does not know, is in the annotation `packer/share`.
"""

from __future__ import annotations

from packer.engine_spec import V1_RELEASE
from packer.export import quoting, templates
from packer.export.servers import ExportedServer, Module, Options
from packer.export.sources import parsed, refused

_TYPES = {"path": "local", "huggingface": "huggingface"}
"""Kind of source → `type` of a LoraAdapter's source. The operator loads nothing from the others, s3 and http."""
_CACHING = "enable-prefix-caching"
_BY_OTHER_KEYS = ("dtype", "tensor-parallel-size", "enable-lora", _CACHING, f"no-{_CACHING}")


def render(servers: tuple[ExportedServer, ...], options: Options) -> dict[str, str]:
    """`values.yaml` for `helm install`, and `lora-adapters.yaml` for `kubectl apply`."""
    specs = []
    for server in servers:
        repository, _, tag = server.image.rpartition(":")
        if not repository or "/" in tag:  # no tag: what follows the last colon is a registry's port
            repository, tag = server.image, "latest"
        settings = {key: value for key, value in server.settings().items() if key not in _BY_OTHER_KEYS}
        flags = [word for key, value in settings.items() for word in _joined(key, value)]
        flags += quoting.words(server.served_names)
        # The chart turns prefix caching off unless this says otherwise; the default of vLLM's V1 is on.
        engine = server.bin.profile.engine
        caching = engine.switches.get(_CACHING, engine.release >= V1_RELEASE)
        specs.append((server, repository, tag, caching, flags))
    adapters = [(server, item, _adapter_source(item)) for server in servers for item in server.modules]
    return {
        "values.yaml": templates.render("helm-values.yaml", servers=specs, options=options),
        "lora-adapters.yaml": templates.render("lora-adapters.yaml", adapters=adapters, options=options),
    }


def _joined(key: str, value: object) -> list[str]:
    """A flag as `--key=value`; as several words if it has a list of values, or no value."""
    several = isinstance(value, list) or value is True
    return quoting.words({key: value}) if several else [f"--{key}={value}"]


def _adapter_source(item: Module) -> dict[str, str]:
    kind, rest = parsed(item.source)
    if kind not in _TYPES:
        raise refused(item.name, item.source, "a path or a Hugging Face repository (the operator loads nothing else)")
    # With a path, the operator gives that to vLLM, which downloads a repository itself; else it wants a token.
    source = {"type": _TYPES[kind], "adapterName": item.name, "adapterPath": rest}
    return source | ({"repository": rest} if kind == "huggingface" else {})
