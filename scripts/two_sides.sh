#!/usr/bin/env bash
# two_sides.sh FOLDER: creates the environments FOLDER/before and FOLDER/after for scripts/slower.py, and their working folders,
# FOLDER/before-project and FOLDER/after-project. Variables:
# BEFORE, AFTER          packages to install on each side, such as torch==2.12.1 [default: only the suite's requirements]
# BEFORE_REF, AFTER_REF  git revisions of the project in the current folder; without BEFORE_REF, both sides work in the current folder, and the
#                        project is not installed
set -euo pipefail
suite=$(cd "$(dirname "$0")/.." && pwd) work=${1:?folder}
python=${PYTHON:-python3}
mkdir -p "$work"
side() { # side NAME REQUIREMENTS REVISION
  local name=$1 revision=$3 project=$work/$1-project packages
  read -rd '' -a packages <<<"$2" || true # all lines
  packages+=("${suite}[run]")
  if [ -z "$revision" ]; then
    ln -sfn "$PWD" "$project"
  else
    git worktree add --detach "$project" "$revision"
    if [ -f "$project/setup.py" ] || grep -qsE '^\[(project|build-system)\]' "$project/pyproject.toml"; then packages+=("$project"); fi
  fi
  "$python" -m venv "$work/$name"
  "$work/$name/bin/python" -m pip --disable-pip-version-check install --quiet "${packages[@]}"
}
side before "${BEFORE:-}" "${BEFORE_REF:-}"
side after "${AFTER:-}" "${BEFORE_REF:+${AFTER_REF:-HEAD}}"
