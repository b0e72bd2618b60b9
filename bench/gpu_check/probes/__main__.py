"""`python -m bench.gpu_check.probes NAME DEVICE`: prints a probe's finding as JSON.

NAME is a probe of this package, or MODULE:FUNCTION elsewhere.
"""

from __future__ import annotations

import json
import os
import pkgutil
import sys
from dataclasses import asdict, is_dataclass

from bench.gpu_check.probes.finding import ProbeFinding

MODULES = {
    "processes": ("host", "nvml", "fork"),
    "one_device": ("memory", "profiler", "speed", "float8"),
    "numerics": ("numerics", "weights", "collectives"),
}


def main(name: str, device: str) -> None:
    module = next((module for module, names in MODULES.items() if name in names), "")
    place = f"bench.gpu_check.probes.{module}:{name}" if module else name
    finding: ProbeFinding = pkgutil.resolve_name(place)(device)
    facts = finding.facts
    values = {
        "verdict": finding.verdict,
        "reason": finding.reason,
        "device": device,
        "facts": asdict(facts) if is_dataclass(facts) and not isinstance(facts, type) else facts,
    }
    print(json.dumps(values, default=str), flush=True)
    os._exit(0)  # some libraries hang or crash when Python exits


if __name__ == "__main__":
    main(*sys.argv[1:])
