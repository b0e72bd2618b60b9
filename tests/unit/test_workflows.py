"""The workflows and the action follow GitHub's schemas, and their scripts parse."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yaml"))
ACTION = ROOT / "action.yaml"


def problems(schema: str, *files: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *map(str, files)],
        capture_output=True,
        text=True,
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.mark.skipif(
    find_spec("check_jsonschema") is None, reason="check-jsonschema is not installed: make setup"
)
def test_github_accepts_them(tmp_path: Path) -> None:
    assert len(WORKFLOWS) >= 2
    assert problems("vendor.github-workflows", *WORKFLOWS) == ""
    assert problems("vendor.github-actions", ACTION) == ""
    assert problems("vendor.dependabot", ROOT / ".github" / "dependabot.yml") == ""
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    assert problems("vendor.github-issue-config", forms.pop(0)) == ""
    assert problems("vendor.github-issue-forms", *forms) == ""
    for schema, file, key in (
        ("vendor.github-workflows", WORKFLOWS[0], "jobs"),
        ("vendor.github-actions", ACTION, "runs"),
    ):
        wrong = tmp_path / file.name
        wrong.write_text(file.read_text().replace(f"\n{key}:", f"\n{key}s:"))
        assert problems(schema, wrong) != "", "the check sees a misspelt key"


def steps(content: Any) -> list[dict[str, Any]]:
    if "runs" in content:
        return list(content["runs"]["steps"])
    return [step for job in content["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("file", [*WORKFLOWS, ACTION], ids=lambda file: file.name)
def test_their_scripts_parse_and_take_inputs_from_the_environment(file: Path) -> None:
    scripts = [step["run"] for step in steps(yaml.safe_load(file.read_text())) if "run" in step]
    assert scripts
    for script in scripts:
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
        assert done.stderr == ""
        assert "${{ inputs" not in script, "a user's text would be run as a command"


def test_the_action_reads_every_input_and_calls_options_that_exist() -> None:
    from scripts.slower import _parser

    content = yaml.safe_load(ACTION.read_text())
    text = str(content["runs"])
    assert [name for name in content["inputs"] if f"inputs.{name} " not in text] == []
    used = set(re.findall(r"(?<![\w-])--[a-z-]+", steps(content)[-1]["run"]))
    offered = {word for action in _parser()._actions for word in action.option_strings}
    assert used - offered == set()
    assert {"--before", "--after", "--json"} <= used


@pytest.mark.parametrize("file", [*WORKFLOWS, ACTION], ids=lambda file: file.name)
def test_actions_are_pinned_by_digest(file: Path) -> None:
    """A tag can be moved to other code."""
    used = re.findall(r"uses: (\S+)(.*)", file.read_text())
    assert used
    for action, comment in used:
        assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action), action
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), "dependabot reads the version"


def test_the_readme_of_a_release_has_no_relative_links() -> None:
    url = "https://example.org/me/suite"
    done = subprocess.run(
        [ROOT / "scripts" / "release.sh", url, "v1"],
        env=os.environ | {"ONLY_TEXT": "yes"},
        capture_output=True,
        text=True,
        check=True,
    )
    readme, _, project = done.stdout.partition("[build-system]")
    targets = re.findall(r"\]\(([^)]+)\)", readme)
    assert len(targets) > 20
    assert [target for target in targets if not target.startswith((f"{url}/", "#"))] == []
    assert f'Repository = "{url}"' in project
    assert f"{url}/raw/v1/docs/report.png" in targets


def test_targets_of_make_that_workflows_call_exist() -> None:
    made = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = {
        name for file in WORKFLOWS for name in re.findall(r"run: make ([a-z-]+)", file.read_text())
    }
    assert called
    assert called <= made
