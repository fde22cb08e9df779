"""nginx: a map from the header `X-Adapter` to the server, with `split_clients` for replicated adapters.

Requests with the same header `X-Session-Id` go to the same replica.

nginx doesn't read request bodies, so clients (or a gateway in front) send the adapter's name in the header
`X-Adapter` too; characters other than letters, digits and `._/:@+-` are percent-encoded. nginx compares
the values of a map without case, so names that differ by case alone become regular expressions, which keep
it.
"""

from __future__ import annotations

from collections import Counter

from packer.export import quoting, templates
from packer.export.servers import ExportedServer, Options, routes


def render(servers: tuple[ExportedServer, ...], options: Options) -> dict[str, str]:
    """`nginx.conf`, to be included in the block `http`."""
    table = {quoting.header_key(name): places for name, places in routes(servers).items()}
    folded = Counter(key.lower() for key in table)
    splits, rows = [], []
    for number, (key, places) in enumerate(table.items()):
        target = places[0][0].name
        if len(places) > 1:
            target = f"$packer_split_{number}"
            parts = [(f"{100 * share:.2f}%", server.name) for server, share in places]
            splits.append((target, [*parts[:-1], ("*", parts[-1][1])]))
        rows.append((quoting.nginx_map_key(key, exact_case=folded[key.lower()] > 1), target))
    # Both tables must hold the longest key; nginx rounds the bucket up to the cache line itself.
    text = templates.render(
        "nginx.conf",
        servers=servers,
        splits=splits,
        rows=rows,
        bucket=1 << max(6, (max(map(len, table)) + 64).bit_length()),
        most=1 << max(11, (4 * len(table)).bit_length()),
    )
    return {"nginx.conf": text}
