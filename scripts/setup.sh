#!/usr/bin/env bash
# Makes .venv with everything pinned; does nothing when it is already right. Works as an ordinary user.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
say() { printf 'setup: %s\n' "$*"; }

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
  say "needs Python 3.10 or newer as '$python'; install Debian's package python3, or name another with PYTHON=..." >&2
  exit 1
fi
for tool in git g++ make; do
  command -v "$tool" >/dev/null || { say "needs $tool; install Debian's packages: git g++ make" >&2; exit 1; }
done

want=$(cat pyproject.toml constraints.txt scripts/setup.sh | sha256sum | cut -c1-16)-$("$python" -c 'import sys; print(*sys.version_info[:3], sep=".")')
stamp=.venv/.set-up
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then
  exit 0
fi
if [ ! -x .venv/bin/python ]; then
  say "making .venv with $("$python" --version)"
  if ! "$python" -m venv .venv 2>/dev/null; then
    rm -rf .venv
    say "cannot make a virtual environment; install Debian's package python3-venv" >&2
    exit 1
  fi
fi
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }
say "1/3 installing torch (the largest part)"
pip install --quiet --constraint constraints.txt setuptools torch
say "2/3 installing the suite and its tools"
pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
say "3/3 checking"
.venv/bin/python -c 'import torch, transformers, bench.cli; print("setup: torch", torch.__version__, "transformers", transformers.__version__)'
echo "$want" > "$stamp"
