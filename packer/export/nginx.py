"""nginx: a map from the header `X-Adapter` to the server, with `split_clients` for replicated adapters.

nginx doesn't read request bodies, so clients (or a gateway in front) send the adapter's name in the header
`X-Adapter` too; characters other than letters, digits and `._/:@+-` are percent-encoded. nginx compares
the values of a map without case, so names that differ by case alone become regular expressions, which keep
it.
"""

from __future__ import annotations

from collections import Counter

from packer.export import quoting
from packer.export.servers import Options, Server, routes

HEADER = "X-Adapter"


def render(servers: tuple[Server, ...], options: Options) -> dict[str, str]:
    """`nginx.conf`, to be included in the block `http`."""
    table = {quoting.header_key(name): places for name, places in routes(servers).items()}
    folded = Counter(key.lower() for key in table)
    lines = ["# adapter (header X-Adapter, percent-encoded) -> server; include in the block http"]
    lines += [f"upstream {server.name} {{ server {server.address}; keepalive 64; }}" for server in servers]
    lines.append("")
    rows = []
    for number, (key, places) in enumerate(table.items()):
        target = places[0][0].name
        if len(places) > 1:
            target = f"$packer_split_{number}"
            lines += _split(number, places)
        rows.append(f"  {quoting.nginx_map_key(key, exact_case=folded[key.lower()] > 1)} {target};")
    # Both tables must hold the longest key; nginx rounds the bucket up to the cache line itself.
    longest = max(map(len, table))
    lines += [
        f"map_hash_bucket_size {1 << max(6, (longest + 64).bit_length())};",
        f"map_hash_max_size {1 << max(11, (4 * len(table)).bit_length())};",
        f"map $http_{HEADER.lower().replace('-', '_')} $packer_server {{",
        '  default "";',
        *rows,
        "}",
        *_SERVER.splitlines(),
    ]
    return {"nginx.conf": "\n".join(lines) + "\n"}


_SERVER = """
server {
  listen 8080;
  location / {
    if ($packer_server = "") { return 404; }
    proxy_pass http://$packer_server;
    proxy_http_version 1.1;
    proxy_set_header Connection "";
    proxy_buffering off;
    proxy_read_timeout 3600s;
  }
}"""


def _split(number: int, places: list[tuple[Server, float]]) -> list[str]:
    """A random split of one adapter's requests in proportion to the shares."""
    rows = [f"  {100 * share:.2f}% {server.name};" for server, share in places[:-1]]
    return [
        f'split_clients "${{request_id}}" $packer_split_{number} {{',
        *rows,
        f"  * {places[-1][0].name};",
        "}",
    ]
