#!/usr/bin/env bash
# Runs the unit tests and the matrix smoke with the newest release of every library, also beyond the versions that were tried. Variables:
# VENV, PYTHON   as for scripts/other_torch.sh
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-$(mktemp -d)/venv}
"${PYTHON:-python3}" -m venv "$venv"
names=$(sed -n '/^dependencies = \[/,/^\]/p; /^\(run\|accelerate\|bitsandbytes\|datasets\|fairscale\|peft\|torchao\|torchft\|mlflow\|prometheus\|wandb\) = /p' pyproject.toml |
  grep -o '"[^"]*"' | sed 's/"\([A-Za-z-]*\).*/\1/')
# shellcheck disable=SC2086 # one requirement per word
"$venv/bin/python" -m pip --disable-pip-version-check install --quiet --upgrade $names hypothesis jsonschema pytest pytest-timeout
export PYTHONPATH=$PWD PARALLELISM_BENCH_UNTRIED=1
"$venv/bin/python" -m pip --disable-pip-version-check list
"$venv/bin/python" -m pytest tests/unit -m "not thorough"
"$venv/bin/python" -m bench run --matrix smoke --results "$venv/results"
