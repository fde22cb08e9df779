"""Text of users inside other languages: JSON, YAML, Kubernetes names, file names, headers, nginx.

An adapter may have any name; no name may change what a target does.
"""

from __future__ import annotations

import hashlib
import json
import re
import urllib.parse
from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import yaml

_PLAIN_YAML = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*", re.ASCII)
_YAML_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf", "infinity"}
_DNS = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", re.ASCII)
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?", re.ASCII)
DNS_LENGTH = 63


def json_text(value: object, *, indent: int | None = None) -> str:
    """JSON in ASCII; never NaN."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False, indent=indent)


@cache
def _dumper() -> type[yaml.SafeDumper]:
    import yaml

    class Dumper(yaml.SafeDumper):
        """Quotes every text that any YAML reader, 1.1 or 1.2, could take for something else."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

        def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
            super().increase_indent(flow, False)

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        plain = _PLAIN_YAML.fullmatch(value) and value.lower() not in _YAML_WORDS
        block = "|" if "\n" in value and _fits_block(value) else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if plain else block or '"')

    Dumper.add_representer(str, text)
    return Dumper


def _fits_block(value: str) -> bool:
    """Whether a YAML literal block keeps the text: printable ASCII lines without blanks at the ends."""
    if value.startswith((" ", "\n")) or not value.endswith("\n") or value.endswith("\n\n"):
        return False
    return value.isascii() and all(line.isprintable() and line == line.rstrip() for line in value.split("\n"))


def yaml_text(documents: Iterable[object]) -> str:
    """YAML documents; texts are quoted so that YAML 1.1 and 1.2 readers agree on them."""
    import yaml

    parts = list(documents)
    return yaml.dump_all(
        parts,
        Dumper=_dumper(),
        sort_keys=False,
        allow_unicode=False,
        width=2**31,
        explicit_start=len(parts) > 1,
    )


def dns_name(name: str) -> str:
    """A DNS label (RFC 1123) for a name: itself where it is one, else a readable part and a hash."""
    if len(name) <= DNS_LENGTH and _DNS.fullmatch(name):
        return name
    readable = re.sub(r"[^a-z0-9]+", "-", name.lower(), flags=re.ASCII).strip("-")[:40].strip("-")
    return f"{readable or 'adapter'}-{hashlib.sha256(name.encode()).hexdigest()[:10]}"


def label_value(name: str) -> str:
    """A value of a Kubernetes label for a name, made as `dns_name` does."""
    if len(name) <= DNS_LENGTH and _LABEL.fullmatch(name):
        return name
    return dns_name(name)


def file_name(name: str) -> str:
    """One component of a path: never empty, never `.` or `..`, never with a separator."""
    quoted = urllib.parse.quote(name, safe="")
    return quoted.replace(".", "%2E") if quoted.strip(".") == "" else quoted


def header_key(name: str) -> str:
    """A name in a request header: itself if it is a usual name, else percent-encoded."""
    return urllib.parse.quote(name, safe="/:@+").replace("~", "%7E")


def doubled_dollars(value: object) -> Any:
    """Values of a Compose file, where `$` starts an interpolation: escaped in every text inside lists and mappings."""
    if isinstance(value, str):
        return value.replace("$", "$$")
    if isinstance(value, Mapping):
        return {key: doubled_dollars(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [doubled_dollars(item) for item in value]
    return value


_NGINX_MAP_WORDS = {"default", "hostnames", "include", "volatile"}


def nginx_map_key(key: str, *, exact_case: bool) -> str:
    """A source value of nginx's `map` from a `header_key`.

    Plain values are compared without case; with `exact_case` the value becomes a regular expression.
    """
    if exact_case:
        pattern = key.replace(".", "[.]").replace("+", "[+]")
        return f'"~^{pattern}$"'
    return f'"\\{key}"' if key.lower() in _NGINX_MAP_WORDS else f'"{key}"'
