"""Autoscalers that follow a metric, as controllers of the cluster twin: what a plan is compared with.

Every server may serve every adapter. Sources: Kubernetes' HorizontalPodAutoscaler (kubernetes.io/docs, "Algorithm
details": desired = ceil(sum of the metric / target); scale-down takes the largest desired number of the last 300 s, and
every 15 s it looks), KEDA (keda.sh, `pollingInterval` 30 s, the HPA acts on its metric) and NVIDIA Dynamo's planner on
load (`components/planner`: every 180 s one decode worker more above a KV usage of 0.9, one less below 0.5).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from packer.change import Change

Rule = Literal["queue", "concurrency", "kv"]
STABLE_S = 300.0
KV_UP, KV_DOWN = 0.9, 0.5
PERIOD_S: dict[Rule, float] = {"queue": 30.0, "concurrency": 15.0, "kv": 180.0}


@dataclass(eq=False)
class Autoscaler:
    """Starts and stops servers of a cluster by a rule.

    `rule`: "queue": waiting requests of each server (KEDA on `vllm:num_requests_waiting`); "concurrency": running and
    waiting ones; "kv": the used share of the KV cache (Dynamo).
    `target`: of the metric for each server; of "kv" it has no meaning.
    `running`: servers that run at the start.
    """

    rule: Rule
    target: float
    running: int
    period_s: float = 0.0
    _started: set[int] = field(default_factory=set)
    _recent: deque[tuple[float, int]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.period_s = self.period_s or PERIOD_S[self.rule]
        self._started = set(range(self.running))
        self._seen: set[int] = set(self._started)
        self._desired = self.running

    def act(self, now_s: float, view: Any) -> Iterable[Change]:
        """Servers that are started or stopped now."""
        ready = set(np.flatnonzero(view.on).tolist())
        self._started -= {s for s in self._started if s in self._seen and s not in ready}  # lost
        self._seen = (self._seen | ready) & self._started
        wanted = min(max(1, self._wanted(now_s, view, sorted(ready))), len(view.on))
        off = [s for s in range(len(view.on)) if s not in self._started and s not in ready]
        if len(self._started) < wanted:
            starts = tuple(off[: wanted - len(self._started)])
            self._started |= set(starts)
            return [Change(now_s, start=starts)] if starts else []
        if len(self._started) > wanted and self._started <= ready:
            stops = tuple(sorted(self._started)[wanted:])
            self._started -= set(stops)
            return [Change(now_s, stop=stops)]
        return []

    def _wanted(self, now_s: float, view: Any, ready: list[int]) -> int:
        if self.rule == "kv":
            used = float(view.used_share[ready].mean()) if ready else 1.0
            if now_s and ready:
                self._desired = len(self._started) + (used > KV_UP) - (used < KV_DOWN)
            return self._desired
        total = view.waiting + (view.running if self.rule == "concurrency" else 0)
        desired = math.ceil(float(total.sum()) / self.target)
        self._recent.append((now_s, desired))
        while self._recent[0][0] < now_s - STABLE_S:
            self._recent.popleft()
        return max(each for _, each in self._recent)
