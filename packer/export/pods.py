"""What pods need in addition to the plan: volumes with the adapters, and a token for gated models.

Without one of them a pod is scheduled, takes a GPU and fails, so it is refused here.
"""

from __future__ import annotations

from packer.errors import IncompatibleError, shown
from packer.export.servers import ExportedServer, Options
from packer.export.sources import parsed

GATED = ("meta-llama/", "google/gemma")
"""Starts of repositories that Hugging Face hands out only with a token."""


def check_pods(servers: tuple[ExportedServer, ...], options: Options) -> None:
    """Raise `IncompatibleError` where an adapter is a path without a volume, or a gated model has no token."""
    folder = options.adapters_dir.rstrip("/") + "/"
    for server in servers:
        for item in server.modules:
            kind, path = parsed(item.source)
            if kind != "path":
                continue
            if not options.adapters_claim:
                raise IncompatibleError(
                    f"Adapter {shown(item.name)} is the path {shown(path)}, and no volume is mounted there: give "
                    "--adapters-claim, the volume claim that holds the adapters, or --sources with repositories."
                )
            if not path.startswith(folder):
                raise IncompatibleError(
                    f"Expected the path of adapter {shown(item.name)} to lie below {folder}, where the claim "
                    f"{options.adapters_claim} is mounted (--adapters-dir), got {shown(path)}."
                )
    for model in sorted({server.model for server in servers}):
        if model.startswith(GATED) and not options.token_secret:
            raise IncompatibleError(
                f"{model} is downloaded only with a Hugging Face token: give --token-secret, the Secret whose key "
                "'token' holds it, or --model with a copy that needs none."
            )
