"""Engines by name, and vLLM's; others are registered as plug-ins are (`packer.strategies.Engine`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from packer import registry
from packer.strategies import Engine


@dataclass(frozen=True, slots=True)
class Vllm:
    """vLLM V1 with the profile's settings (`packer.twin.engine.advance`)."""

    name: ClassVar[str] = "vllm"
    cells: ClassVar[bool] = False
    trains: ClassVar[bool] = True
    serves_base: ClassVar[bool] = True
    cv: ClassVar[float] = 0.0

    def refusal(self, policy: str, loading: str, form: str) -> str | None:
        """It has a cache policy of its own, and loads adapters in a step."""
        if policy != "lru":
            return f"vLLM has a cache policy of its own, lru, and can't have {policy!r}"
        if loading not in ("blocking", "none"):
            return f"vLLM loads adapters in a step, and can't load them {loading!r}; engine 'lightllm' can"
        return None

    def longest_request(self, setup: Any) -> int:
        """By the profile's max_model_len and the KV cache."""
        return int(setup.server.longest_request())

    def prepare(self, setup: Any, state: Any) -> Any:
        """Nothing more than what the profile says."""
        return state

    def kernels(self) -> None:
        """The loop's own."""


VLLM = Vllm()


def engine_of(spec: str) -> Engine:
    """The engine that a text names, with parameters as in "lightllm:max_wait_tokens=1".

    Raises `UnknownNameError`: there is no such engine; `ValidationError`: it has no such parameter, or the value
    breaks a rule.
    """
    engine: Engine = registry.make("engine", spec)
    return engine
