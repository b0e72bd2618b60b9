"""The example of docs/python.md runs as a script without a main guard, in its own process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import bench

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "python.md"


def test_the_documents_example_runs_as_a_script(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python run\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len([line for line in example.splitlines() if line.strip()]) == 3
    script = tmp_path / "script.py"
    script.write_text(
        "import os\n"
        f"open({str(tmp_path / 'processes')!r}, 'a').write(f'{{os.getpid()}} ')\n"
        f"{example}"
        "import json\n"
        "print(json.dumps([results.answer and results.answer.advice[0].role,"
        " str(results.report('page.html')), len(results.steps)]))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, script.name],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len((tmp_path / "processes").read_text().split()) == 1, "the script ran once"
    role, page, steps = json.loads(done.stdout.splitlines()[-1])
    loaded = bench.load(tmp_path / "results")
    assert role == (loaded.answer.advice[0].role if loaded.answer else None)
    assert steps == len(loaded.steps) > 0
    assert "page.html" in page
    assert (tmp_path / page).stat().st_size > 10_000
    assert loaded.trials["status"].tolist() == ["ok"] * 4
    assert sorted(loaded.cells["label"]) == ["ddp", "fsdp2"]
    assert set(loaded.cells["parity_verdict"]) == {"exact"}
