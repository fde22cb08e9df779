"""Escape users' text for other languages: JSON, YAML, Kubernetes names, file names, headers, nginx. Adapters may have
any name, but no name may change the meaning of an exported file."""

from __future__ import annotations

import hashlib
import json
import re
import urllib.parse
from collections.abc import Callable, Iterable, Mapping

_PLAIN_YAML = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*", re.ASCII)
_YAML_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf", "infinity"}
_DNS = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", re.ASCII)
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?", re.ASCII)
DNS_LENGTH = 63


def json_text(value: object, *, indent: int | None = None) -> str:
    """JSON in ASCII; raises for NaN and infinities."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False, indent=indent)


def words(flags: Mapping[str, object]) -> list[str]:
    """Flags as words of a command line; True is a flag without value, a list is a flag with several values."""
    found = []
    for name, value in flags.items():
        values = value if isinstance(value, list) else [] if value is True else [value]
        found += [f"--{name}", *map(str, values)]
    return found


def yaml_value(value: object) -> str:
    """A value in YAML: a word stays plain if YAML 1.1 and 1.2 read it as text; other values become JSON in ASCII."""
    if isinstance(value, str) and _PLAIN_YAML.fullmatch(value) and value.lower() not in _YAML_WORDS:
        return value
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if isinstance(value, float) and "." not in text:
        return text.replace("e", ".0e")  # YAML 1.1 reads a float without a point as text
    return re.sub(r"[^ -~]", lambda found: f"\\U{ord(found[0]):08x}", text)


def dns_name(name: str) -> str:
    """A DNS label (RFC 1123) for a name: the name itself if it is a DNS label, else a readable part and a hash."""
    if len(name) <= DNS_LENGTH and _DNS.fullmatch(name):
        return name
    readable = re.sub(r"[^a-z0-9]+", "-", name.lower(), flags=re.ASCII).strip("-")[:40].strip("-")
    return f"{readable or 'adapter'}-{hashlib.sha256(name.encode()).hexdigest()[:10]}"


def alike(names: Iterable[str], key: Callable[[str], str]) -> tuple[str, str] | None:
    """The first two different names with the same key, whose exported objects would overwrite each other; else None."""
    owner: dict[str, str] = {}
    pairs = ((owner.setdefault(key(name), name), name) for name in names)
    return next((pair for pair in pairs if pair[0] != pair[1]), None)


def label_value(name: str) -> str:
    """A value of a Kubernetes label for a name: the name itself if it is valid, else `dns_name`."""
    if len(name) <= DNS_LENGTH and _LABEL.fullmatch(name):
        return name
    return dns_name(name)


def file_name(name: str) -> str:
    """A name as one component of a path, without separators; `.` and `..` are escaped."""
    quoted = urllib.parse.quote(name, safe="")
    return quoted.replace(".", "%2E") if quoted.strip(".") == "" else quoted


def header_key(name: str) -> str:
    """A name in a request header; characters other than letters, digits and `._/:@+-` are percent-encoded."""
    return urllib.parse.quote(name, safe="/:@+").replace("~", "%7E")


_NGINX_MAP_WORDS = {"default", "hostnames", "include", "volatile"}


def nginx_map_key(key: str, *, exact_case: bool) -> str:
    """A source value of nginx's `map` from a `header_key`. nginx ignores case in plain values; with `exact_case` the
    value becomes a case-sensitive regular expression."""
    if exact_case:
        pattern = key.replace(".", "[.]").replace("+", "[+]")
        return f'"~^{pattern}$"'
    return f'"\\{key}"' if key.lower() in _NGINX_MAP_WORDS else f'"{key}"'
