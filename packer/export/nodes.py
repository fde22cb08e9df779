"""Nodes on which a server may run, selected by the label of its kind of GPU if a plan has several kinds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from packer.errors import IncompatibleError, ValidationError, shown
from packer.io.shipped import table

_KEY = re.compile(r"([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", re.ASCII)
_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", re.ASCII)
_MOST_CHARACTERS = 63
KINDS = table("packer.export", "nodes.toml")  # Name of a GPU → key and values of its node label, and its name in Ray.


def short_name(gpu: str) -> str:
    """A short name for a GPU: a100-80gb for "NVIDIA A100 80GB", rtx4090 for "NVIDIA GeForce RTX 4090"."""
    text = re.sub(r"^(nvidia|amd|intel)[ -]|geforce[ -]|[ -]sxm(?=[ -])", "", gpu.lower().strip())
    return re.sub(r"(rtx)-(?=\d)", r"\1", re.sub(r"[ _]+", "-", text))


def parse_labels(texts: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Labels from texts `[GPU:]KEY=VALUE`: short name of a GPU, or "" for every GPU → key and value. Raises
    `ValidationError`: a text is not a label, or a kind of GPU has two labels."""
    found: dict[str, tuple[str, str]] = {}
    for text in texts:
        label, _, value = text.partition("=")
        kind, colon, key = label.partition(":")
        kind, key = (kind, key) if colon else ("", label)
        short = all(len(part) <= _MOST_CHARACTERS for part in (key.rpartition("/")[2], value))
        if not _KEY.fullmatch(key) or not _VALUE.fullmatch(value) or not short:
            rule = "Expected --node-label [GPU:]KEY=VALUE with a key and a value of Kubernetes labels,"
            raise ValidationError(f"{rule} got {shown(text)}.")
        kind = short_name(kind)
        if kind in found:
            raise ValidationError(f"Expected one --node-label for {kind or 'every kind of GPU'}, got two.")
        found[kind] = (key, value)
    return found


def node_labels(gpu: str, kinds: int, given: Mapping[str, tuple[str, str]]) -> dict[str, list[str]]:
    """Key of a label → values, of which a node must have one to run a server on this kind of GPU. Empty: any node, or
    no label is known for the kind, which formats with nodes refuse (`packer.export.kubernetes.check_pods`).

    `kinds`: number of kinds of GPU in the plan; a plan with one kind needs no label.
    `given`: labels from the user (`parse_labels`), which replace the known label.
    """
    if own := given.get(short_name(gpu)) or given.get(""):
        return {own[0]: [own[1]]}
    known = KINDS.get(gpu) if kinds > 1 else None
    return {} if known is None else {known["key"]: list(known["values"])}


def ray_accelerator(gpu: str) -> str:
    """Ray's accelerator type of a GPU; raises `IncompatibleError` if Ray has none."""
    name: str | None = KINDS.get(gpu, {}).get("ray")
    if name is None:
        rule = f"Ray Serve selects nodes by an accelerator type, and has none for {shown(gpu)}: use another format,"
        raise IncompatibleError(f"{rule} or plan with one kind of GPU.")
    return name
