#!/usr/bin/env bash
# two_sides.sh FOLDER: makes the environments FOLDER/before and FOLDER/after for scripts/slower.py, and FOLDER/before-project and
# FOLDER/after-project, where they start. Variables:
# BEFORE, AFTER          what pip installs on each side, such as torch==2.12.1 [default: what the suite needs]
# BEFORE_REF, AFTER_REF  git revisions of the project in the current folder; without the first, the project is not installed
set -euo pipefail
suite=$(cd "$(dirname "$0")/.." && pwd) work=${1:?folder}
python=${PYTHON:-python3}
mkdir -p "$work"
side() { # side NAME REQUIREMENTS REVISION
  local name=$1 revision=$3 project=$work/$1-project words
  read -ra words <<<"$2"
  "$python" -m venv "$work/$name"
  "$work/$name/bin/python" -m pip --disable-pip-version-check install --quiet "${suite}[run]" ${words[@]+"${words[@]}"}
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
