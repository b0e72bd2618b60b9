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

# What a set-up needs from the system, and what adds strategies: `package:how to see that it is there`.
there() { case $1 in
  python3-dev) [ -f "$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] ;;
  libaio-dev) printf '#include <libaio.h>' | g++ -E -x c++ - >/dev/null 2>&1 ;;
  libopenmpi-dev) command -v mpicxx >/dev/null ;;
  slurm-wlm) PATH=$PATH:/usr/sbin command -v slurmctld >/dev/null ;;
  munge) PATH=$PATH:/usr/sbin command -v munged >/dev/null ;;
  openmpi-bin) command -v mpirun >/dev/null ;;
  *) command -v "$1" >/dev/null ;;
  esac; }
missing() { local name; for name in "$@"; do there "$name" || echo "$name"; done; }
need=(git g++ make python3-dev)
like=(libaio-dev openmpi-bin libopenmpi-dev) # DeepSpeed's offload to disk; Horovod over MPI, Adasum
tests=(chromium slurm-wlm munge shellcheck) # what some tests need: without it they are skipped and say so
mapfile -t lack < <(missing "${need[@]}" "${like[@]}" "${tests[@]}")
if [ ${#lack[@]} != 0 ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  say "installing Debian's packages ${lack[*]}"
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${lack[@]}"; } >/dev/null 2>&1 ||
    say "that failed; without them:" >&2
fi
mapfile -t lack < <(missing "${need[@]}")
if [ ${#lack[@]} != 0 ]; then
  say "needs ${lack[*]}; install Debian's packages: ${lack[*]}" >&2
  exit 1
fi
mapfile -t lack < <(missing "${like[@]}")

want=$({ cat pyproject.toml constraints.txt scripts/setup.sh scripts/native.sh; echo "${lack[@]}"; } | sha256sum | cut -c1-16)
want=$want-$("$python" -c 'import sys; print(*sys.version_info[:3], sep=".")')
stamp=.venv/.set-up
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then
  exit 0
fi
[ ${#lack[@]} = 0 ] || say "without Debian's packages ${lack[*]} some cells are unavailable; install them and run this again" >&2
if [ ! -x .venv/bin/python ]; then
  say "making .venv with $("$python" --version)"
  if ! "$python" -m venv .venv 2>/dev/null; then
    rm -rf .venv
    say "cannot make a virtual environment; install Debian's package python3-venv" >&2
    exit 1
  fi
fi
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }
say "1/4 installing torch (the largest part)"
pip install --quiet --constraint constraints.txt setuptools torch
say "2/4 installing the suite, its tools and the libraries of the strategies"
pip install --quiet --constraint constraints.txt wheel cmake ninja
pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
say "3/4 what has no binary release: Horovod, and DeepSpeed with its compiled parts"
mapfile -t wheels < <(scripts/native.sh .venv/bin/python)
[ ${#wheels[@]} = 2 ] || exit 1
pip install --quiet --constraint constraints.txt "${wheels[@]}"
say "4/4 checking"
.venv/bin/python -c 'import torch, transformers, bench.cli; print("setup: torch", torch.__version__, "transformers", transformers.__version__)'
echo "$want" > "$stamp"
