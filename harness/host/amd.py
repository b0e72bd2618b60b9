"""AMD GPUs on this host, which the suite reports but does not use."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

_SYS = Path("/sys")


def amd_gpus(sys: Path = _SYS) -> dict[str, int]:
    """Returns the number of AMD GPUs by instruction set, such as {"gfx942": 8}.

    Reads the topology of the kernel driver `amdkfd`, in which CPUs have no SIMD units. Version
    90402 means gfx942: major, minor and stepping, the last two in hexadecimal.
    """
    found: Counter[str] = Counter()
    for file in (sys / "class/kfd/kfd/topology/nodes").glob("*/properties"):
        try:
            lines = file.read_text().splitlines()
        except OSError:
            continue
        facts = dict(line.split()[:2] for line in lines if " " in line)
        version = int(facts.get("gfx_target_version", 0))
        if version and int(facts.get("simd_count", 0)):
            major, minor, stepping = version // 10000, version // 100 % 100, version % 100
            found[f"gfx{major}{minor:x}{stepping:x}"] += 1
    return dict(found)
