#!/usr/bin/env bash
# two_sides.sh FOLDER: creates the environments FOLDER/before and FOLDER/after for scripts/slower.py, and their working folders,
# FOLDER/before-project and FOLDER/after-project. Variables:
# BEFORE, AFTER          packages to install on each side, such as torch==2.12.1 [default: only the suite's requirements]
# BEFORE_REF, AFTER_REF  git revisions of the project in the current folder; without BEFORE_REF, the project is not installed
set -euo pipefail
suite=$(cd "$(dirname "$0")/.." && pwd) work=${1:?folder}
python=${PYTHON:-python3}
mkdir -p "$work"
side() { # side NAME REQUIREMENTS REVISION
  local name=$1 revision=$3 project=$work/$1-project requirements
  read -ra requirements <<<"$2"
  "$python" -m venv "$work/$name"
  "$work/$name/bin/python" -m pip --disable-pip-version-check install --quiet "${suite}[run]" ${requirements[@]+"${requirements[@]}"}
  if [ -z "$revision" ]; then
    mkdir -p "$project"
    return
  fi
  git worktree add --detach "$project" "$revision"
  if [ -f "$project/pyproject.toml" ]; then
    "$work/$name/bin/python" -m pip --disable-pip-version-check install --quiet "$project"
  fi
}
side before "${BEFORE:-}" "${BEFORE_REF:-}"
side after "${AFTER:-}" "${BEFORE_REF:+${AFTER_REF:-HEAD}}"
