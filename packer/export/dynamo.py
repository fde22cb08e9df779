"""NVIDIA Dynamo 1.3 to 1.5: a graph with a front end and a worker for each server, and DynamoModels.

nvidia.com/v1alpha1, which 1.5 serves beside v1beta1, the version that it stores. The operator loads a DynamoModel on
every pod whose `modelRef` equals its `baseModelName`. So each worker has its server's name as `modelRef`, and an
adapter has a DynamoModel for each of its servers. The planned share is in the annotation `packer/share`.
"""

from __future__ import annotations

from packer.errors import IncompatibleError
from packer.export import templates
from packer.export.servers import ExportedServer, Options, base_by_its_name
from packer.export.sources import address

IMAGE = "nvcr.io/nvidia/ai-dynamo/vllm-runtime:1.3.1"
_MOST_SERVICES = 25  # Largest number of services of a graph, including the front end.


def render(servers: tuple[ExportedServer, ...], options: Options) -> dict[str, str]:
    """`graph.yaml` and `dynamo-models.yaml`, for `kubectl apply -f`."""
    if len(servers) + 1 > _MOST_SERVICES:
        rule = f"Expected at most {_MOST_SERVICES - 1} servers, the most that one DynamoGraphDeployment holds,"
        raise IncompatibleError(f"{rule} got {len(servers)}.")
    base_by_its_name(servers, "Dynamo")
    image = options.image or IMAGE
    prefixes = {"huggingface": "hf://", "s3": "s3://", "path": "file://"}
    expected = "an absolute path, a Hugging Face repository or s3://"
    adapters = [
        (server, item, address(item.name, item.source, prefixes, expected))
        for server in servers
        for item in server.modules
    ]
    return {
        "graph.yaml": templates.render("dynamo-graph.yaml", servers=servers, image=image, options=options),
        "dynamo-models.yaml": templates.render("dynamo-models.yaml", adapters=adapters, options=options),
    }
