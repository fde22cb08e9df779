"""Engines by name, and vLLM's own; others are registered like plug-ins (`packer.strategies.Engine`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from packer import registry
from packer.strategies import Engine


@dataclass(frozen=True, slots=True)
class Vllm:
    """vLLM V1 with the profile's settings (`packer.twin.engine.advance`)."""

    name: ClassVar[str] = "vllm"
    unread: ClassVar[frozenset[str]] = frozenset()
    trains: ClassVar[bool] = True
    serves_base: ClassVar[bool] = True
    cv: ClassVar[float] = 0.0

    def refusal(self, policy: str, loading: str, form: str) -> str | None:
        """Refuse cache policies other than "lru", and loading outside a step; any step law is accepted."""
        if policy != "lru":
            return f"vLLM has a cache policy of its own, lru, and can't have {policy!r}"
        if loading not in ("blocking", "none"):
            return f"vLLM loads adapters in a step, and can't load them {loading!r}; engine 'lightllm' can"
        return None

    def longest_request(self, setup: Any) -> int:
        """The limit given by the profile's `max_model_len` and the KV cache."""
        return int(setup.server.longest_request())

    def prepare(self, setup: Any, state: Any) -> Any:
        """Return the state unchanged: the profile has all settings."""
        return state

    def kernels(self) -> None:
        """None, which stands for vLLM's kernels."""


VLLM = Vllm()


def engine_of(spec: str) -> Engine:
    """The engine of a text such as "lightllm:max_wait_tokens=1"; raises `UnknownNameError`, `ValidationError`."""
    engine: Engine = registry.make("engine", spec)
    return engine
