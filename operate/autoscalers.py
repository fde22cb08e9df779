"""Autoscalers that follow a metric, as controllers of the cluster twin, to compare plans with.

Every server may serve every adapter. Sources:

- Kubernetes' HorizontalPodAutoscaler with its defaults (kubernetes.io/docs, "Horizontal Pod Autoscaling", algorithm
  details): every 15 s ceil(sum of the metric / target), unchanged within 10 % of the target; a fall takes the largest
  number of the last 300 s; a rise at most the larger of 4 and 100 % at a time.
- KEDA's ScaledObject, whose metric that autoscaler reads: vLLM production-stack,
  docs/source/use_cases/autoscaling-keda.rst at 183a136a: `vllm:num_requests_waiting`, threshold 5, polled every 15 s.
- NVIDIA Dynamo's planner on load: examples/llm/components/planner.py at 1a0ded56 and, for its defaults,
  components/planner/src/dynamo/planner/defaults.py at 00c13f8d: the KV usage of each worker, 0.02 more for each waiting
  request, every 10 s; every 180 s one worker more if their mean is above 0.9, one less below 0.5, but not in the three
  intervals after a start, and nothing after an interval in which the number of workers changed.
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
STABLE_S, TOLERANCE, AT_ONCE = 300.0, 0.1, 4
KV_UP, KV_DOWN, KV_WAITING, KV_INTERVAL_S, KV_GRACE = 0.9, 0.5, 0.02, 180.0, 3
PERIOD_S: dict[Rule, float] = {"queue": 15.0, "concurrency": 15.0, "kv": 10.0}


@dataclass(eq=False)
class Autoscaler:
    """Starts and stops servers of a cluster by a rule.

    `rule`: "queue": waiting requests of each server (KEDA on `vllm:num_requests_waiting`); "concurrency": running and
    waiting requests; "kv": the used share of the KV cache (Dynamo).
    `target`: value of the metric for each server; not used by "kv".
    `running`: servers that run at the start.
    """

    rule: Rule
    target: float
    running: int
    period_s: float = 0.0
    _started: set[int] = field(default_factory=set)
    _recent: deque[tuple[float, int]] = field(default_factory=deque)
    _kv: list[float] = field(default_factory=list)
    _grace: int = 0

    def __post_init__(self) -> None:
        self.period_s = self.period_s or PERIOD_S[self.rule]
        self._started = set(range(self.running))
        self._seen: set[int] = set(self._started)
        self._desired, self._adjusted_s, self._workers = self.running, 0.0, self.running

    def act(self, now_s: float, view: Any) -> Iterable[Change]:
        """Return the changes that start or stop servers now."""
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
            return self._by_kv(now_s, view, ready)
        total = float((view.waiting + (view.running if self.rule == "concurrency" else 0)).sum())
        now = max(1, len(self._started))
        near = abs(total / (self.target * now) - 1.0) <= TOLERANCE
        desired = now if near else min(math.ceil(total / self.target), now + max(AT_ONCE, now))
        self._recent.append((now_s, desired))
        while self._recent[0][0] < now_s - STABLE_S:
            self._recent.popleft()
        return max(each for _, each in self._recent)

    def _by_kv(self, now_s: float, view: Any, ready: list[int]) -> int:
        busy, waiting = view.running[ready] > 0, view.waiting[ready]
        self._kv += (view.used_share[ready] + np.where(busy, KV_WAITING * waiting, 0.0)).tolist()
        if now_s - self._adjusted_s < KV_INTERVAL_S:
            return self._desired
        changed, mean = len(ready) != self._workers, float(np.mean(self._kv)) if self._kv else 0.0
        self._adjusted_s, self._workers, self._kv = now_s, len(ready), []
        if changed:
            return self._desired
        self._desired = len(self._started)
        if mean < KV_DOWN and not self._grace:
            self._desired -= 1
        elif mean > KV_UP:
            self._desired, self._grace = self._desired + 1, KV_GRACE
        self._grace = max(0, self._grace - 1)
        return self._desired
