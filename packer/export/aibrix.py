"""AIBrix: the servers as Kubernetes resources without adapters, a Service for each base model, and a ModelAdapter for
each adapter.

model.aibrix.ai/v1alpha1 of AIBrix 0.5 to 0.8: an adapter is loaded on every pod that `spec.podSelector.matchLabels`
selects (`matchExpressions` are not read). The servers of a replicated adapter have a label with their names, so that
no pod starts again where other adapters get other servers. `spec.replicas` is left out: AIBrix only accepts 1.
AIBrix serves an adapter under the name of its resource, and makes a Service of that name: a DNS label that starts with
a letter, and that no server has. It requests a base model by the label `model.aibrix.ai/name` of its Deployments and
pods, through the Service of that name, so vLLM serves the model under that name, too. The annotation `packer/adapter`
has the adapter's own name. AIBrix splits the requests of a replicated adapter by its own routing policy; the planned
shares are in the annotation `packer/shares`.
"""

from __future__ import annotations

from dataclasses import replace

from packer.errors import ValidationError, shown
from packer.export import kubernetes, quoting, templates
from packer.export.servers import MANAGED, ExportedServer, Module, Options, base_by_its_name, routes
from packer.export.sources import address

_NAME, _PORT, _ENABLED = "model.aibrix.ai/name", "model.aibrix.ai/port", "adapter.model.aibrix.ai/enabled"


def render(servers: tuple[ExportedServer, ...], options: Options) -> dict[str, str]:
    """`servers.yaml` and `model-adapters.yaml`, for `kubectl apply -f`."""
    base_by_its_name(servers, "AIBrix")
    sources = {item.name: item.source for server in servers for item in server.modules}
    table = {name: places for name, places in routes(servers).items() if name in sources}
    taken = {server.name for server in servers}

    def resource(name: str, kind: str = "adapter") -> str:
        own = quoting.dns_name(name)
        return own if own[0].isalpha() and own not in taken else quoting.dns_name(f"{kind} {name}")

    models = {server.model: resource(server.model, "model") for server in servers}
    servers = tuple(replace(each, base=(*each.base, Module(models[each.model], "", 1.0))) for each in servers)
    taken |= {*models.values()}
    if pair := quoting.alike(table, resource):
        rule = f"Expected adapters whose Kubernetes names differ, got {shown(pair[0])} and {shown(pair[1])}"
        raise ValidationError(f"{rule}, both {resource(pair[0])!r}: rename one.")

    def labels(server: ExportedServer) -> dict[str, str]:
        own = {_NAME: models[server.model], _PORT: str(server.port), _ENABLED: "true"}
        return own | {key: "true" for key, chosen in sets.items() if server.name in chosen}

    sets: dict[str, dict[str, float]] = {}
    adapters = []
    for name, places in table.items():
        first, annotations = places[0][0], {"packer/adapter": name}
        base, selected = models[first.model], first.labels
        if len(places) > 1:
            shares = {server.name: round(share, 6) for server, share in places}
            annotations["packer/shares"] = quoting.json_text(shares)
            key = f"packer/{quoting.dns_name('-'.join(shares))}"
            sets[key], selected = shares, {key: "true"}
        own = {_NAME: resource(name), _PORT: str(first.port), **MANAGED}
        adapters.append((own, annotations, base, {_NAME: base} | selected, _artifact(name, sources[name])))
    one = {server.model: server for server in reversed(servers)}.values()
    services = [({_NAME: models[each.model], _PORT: str(each.port), **MANAGED}, each) for each in one]
    return {
        "model-adapters.yaml": templates.render("model-adapters.yaml", adapters=adapters, options=options),
        "servers.yaml": kubernetes.manifests(servers, options, labels, with_adapters=False)
        + templates.render("base-services.yaml", services=services, options=options),
    }


def _artifact(name: str, source: str) -> str:
    """The source in AIBrix's syntax (0.8: aibrix/runtime/downloaders.py): a URL or an absolute path. In a bucket,
    AIBrix treats a path that ends with a slash as a folder, which an adapter is, and any other path as a single file.
    https:// is not supported, because AIBrix reads only a single file from it."""
    expected = "what AIBrix loads adapters from: an absolute path, a Hugging Face repository or a bucket"
    buckets = {kind: f"{kind}://" for kind in ("s3", "gcs", "tos")}
    found = address(name, source, {"huggingface": "huggingface://", "path": "", **buckets}, expected)
    return f"{found.rstrip('/')}/" if found.startswith(tuple(buckets.values())) else found
