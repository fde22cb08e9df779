"""What differs between versions of vLLM, as far as the twin knows it: read in the source of 0.5.0, 0.8.5 and 0.32.0.

A version between two of these follows the older one, one before or without numbers 0.8.5.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from packer.profile import EngineSpec

V1 = (0, 8)
"""First version whose V1 engine, with chunked prefills beside decodes, is the default."""
LISTS = (0, 32)
"""Version whose `LoRARequestStates` drops an adapter without requests and adds it last when it comes back."""


@dataclass(frozen=True, slots=True)
class EngineRules:
    """Rules of a version.

    `prefills_first`: a step has prefills or decodes, so that adapters that join are touched before those that run
    (vllm/core/scheduler.py of 0.5.0). `series_of_lists`: both labels of `vllm:lora_requests_info` list the adapters of
    requests that have their first token and are not finished, in order of entry (vllm/v1/metrics/stats.py of 0.32.0),
    instead of the sets of running and of waiting adapters.
    """

    prefills_first: bool
    series_of_lists: bool


def rules_of(engine: EngineSpec) -> EngineRules:
    """The rules of the engine's version."""
    numbers = re.match(r"v?(\d+)\.(\d+)", engine.version)
    version = (int(numbers[1]), int(numbers[2])) if numbers and engine.name == "vllm" else V1
    return EngineRules(version < V1, version >= LISTS)
