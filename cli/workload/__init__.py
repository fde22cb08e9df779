"""`packer workload`: make and describe workloads."""

from __future__ import annotations

from packer.cli.declare import group

COMMANDS = {
    "generate": "A made-up fleet: sets of rates and ranks, or a power law.",
    "from-trace": "Measure a fleet from a trace of requests.",
    "from-access-log": "Measure a fleet from a gateway's access log.",
    "from-metrics": "Measure a fleet from Prometheus.",
    "describe": "Adapters, ranks, rates, lengths and offered load of a workload.",
}


@group(COMMANDS)
def workload() -> None:
    """Make and describe workloads: which adapters, their ranks, request rates and token lengths.

    \b
    Example:
      packer workload generate --adapters 256 --rates 0.1,0.05,0.025 --ranks 8,16 -o fleet.csv
      packer workload describe fleet.csv
    """
