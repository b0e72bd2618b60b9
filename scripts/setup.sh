#!/usr/bin/env bash
# Makes .venv with pinned versions of all packages; does nothing where it is up to date. Needs no root.
# setup.sh          also tries again to build what could not be built before
# setup.sh --need   does not try again: called before a run or a test
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
export CC=${CC:-gcc} CXX=${CXX:-g++}
say() { printf 'setup: %s\n' "$*"; }

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
  say "needs Python 3.10 or newer as '$python'; install Debian's package python3, or name another with PYTHON=..." >&2
  exit 1
fi

# there PACKAGE: whether a Debian package, or the same from elsewhere, is installed.
there() { case $1 in
  python3-dev) [ -f "$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] ;;
  libaio-dev) printf '#include <libaio.h>' | "$CXX" -E -x c++ - >/dev/null 2>&1 ;;
  libopenmpi-dev) command -v mpicxx >/dev/null ;;
  slurm-wlm) PATH=$PATH:/usr/sbin command -v slurmctld >/dev/null ;;
  munge) PATH=$PATH:/usr/sbin command -v munged >/dev/null ;;
  openmpi-bin) command -v mpirun >/dev/null ;;
  g++) command -v "$CXX" >/dev/null ;;
  *) command -v "$1" >/dev/null ;;
  esac; }
missing() { local name; for name in "$@"; do there "$name" || echo "$name"; done; }
need=(git g++ make python3-dev) # without these there is no set-up
like=(libaio-dev openmpi-bin libopenmpi-dev) # for some strategies: DeepSpeed's offload to disk; Horovod over MPI, Adasum
tests=(chromium slurm-wlm munge shellcheck) # for some tests, which are skipped without them
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

# The processor that compiled parts are for: as the caller says, else as in the last set-up, else this machine's.
march=${PARALLELISM_BENCH_MARCH:-$(cat .venv/.march 2>/dev/null || echo native)}
export PARALLELISM_BENCH_MARCH=$march
if ! "$CXX" "-march=$march" -E -x c++ /dev/null >/dev/null 2>&1; then
  say "PARALLELISM_BENCH_MARCH=$march is no processor that $CXX knows: use for instance x86-64-v3, or native for this machine's" >&2
  exit 2
fi

# How Horovod's operations on GPUs are built: as the caller says, else as in the last set-up, else what fits this machine.
. scripts/cuda.sh
cuda=${PARALLELISM_BENCH_CUDA:-$(cat .venv/.cuda 2>/dev/null || echo auto)}
export PARALLELISM_BENCH_CUDA=$cuda
case $cuda in
  auto) fits="$(nvidia_driver | sed 's/..*/a driver/') $(nvcc=$(cuda_compiler) && [ -z "$nvcc" ] || compiler_version "$nvcc" || true)" ;;
  toolkit | packages | no) fits=$cuda ;;
  *) say "PARALLELISM_BENCH_CUDA=$cuda is not known: use auto, toolkit, packages or no" >&2; exit 2 ;;
esac

want=$({ cat pyproject.toml constraints.txt scripts/setup.sh scripts/cuda.sh scripts/native.sh; echo "${lack[@]}"; "$CXX" --version; echo "$march $fits"; } |
  sha256sum | cut -c1-16)
want=$want-$("$python" -c 'import sys; print(*sys.version_info[:3], sep=".")')
stamp=.venv/.set-up
unbuilt() { # prints the libraries that could not be built
  local file
  for file in .venv/share/parallelism-bench/unbuilt/*.json; do [ ! -f "$file" ] || basename "$file" .json; done
}
# identity PYTHON: prints what tells one Python installation from another.
identity() { "$1" -c 'import sys; print(sys.version, sys.base_prefix)' 2>/dev/null || true; }
same=0
[ -n "$(identity .venv/bin/python)" ] && [ "$(identity .venv/bin/python)" = "$(identity "$python")" ] && same=1
if [ $same = 1 ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then
  [ -n "$(unbuilt)" ] || exit 0
  if [ "${1:-}" = --need ]; then
    say "some cells are unavailable, as this could not be built: $(unbuilt | paste -sd ' '); \`make setup\` tries again, \`doctor\` says why"
    exit 0
  fi
fi
[ ${#lack[@]} = 0 ] || say "without Debian's packages ${lack[*]} some cells are unavailable; install them and run this again" >&2
if [ -e .venv ] && [ ! -f .venv/pyvenv.cfg ] && [ -n "$(ls -A .venv)" ]; then
  say ".venv is no virtual environment; move it away" >&2
  exit 1
fi
if [ $same = 0 ]; then
  if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    say "cannot make a virtual environment; install Debian's package python3-venv" >&2
    exit 1
  fi
  if [ -f .venv/pyvenv.cfg ]; then
    say "making .venv anew with $("$python" --version): it was of another Python, or of one that is gone"
  else
    say "making .venv with $("$python" --version)"
  fi
  "$python" -m venv --clear .venv
fi
echo "$march" >.venv/.march
echo "$cuda" >.venv/.cuda
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }
say "1/4 installing torch (the largest part)"
pip install --quiet --no-compile --constraint constraints.txt setuptools torch
scripts/machine.sh .venv/bin/python
say "2/4 installing the suite, its tools and the libraries of the strategies"
pip install --quiet --constraint constraints.txt wheel cmake ninja
pip install --quiet --no-compile --constraint constraints.txt --no-build-isolation --editable '.[dev]'
.venv/bin/python -m compileall -q -q -j 0 .venv/lib || true # on all cores; some packages hold files for other Pythons
say "3/4 installing what has no binary release: Horovod, and DeepSpeed with its compiled parts"
built=$(scripts/native.sh .venv/bin/python)
mapfile -t wheels <<<"$built"
[ -z "$built" ] || pip install --quiet --constraint constraints.txt "${wheels[@]}"
if [ -n "$built" ] && [ "$built" != "$(cat .venv/.wheels 2>/dev/null)" ]; then # pip alone would keep an installed wheel of the same version
  pip install --quiet --no-deps --force-reinstall "${wheels[@]}"
fi
echo "$built" >.venv/.wheels
say "4/4 checking"
.venv/bin/python -c 'import torch, transformers, bench.cli; print("setup: torch", torch.__version__, "transformers", transformers.__version__)'
loads() { # loads MODULE WHEEL: a library that was built but cannot be imported counts as not built
  local name=${1%%.*} log=$PWD/.venv/.loads-${1%%.*}.log version=${2##*/}
  version=${version#*-} version=${version%%-*}
  if .venv/bin/python -c "import $1" >"$log" 2>&1; then rm "$log"; return; fi
  say "  $name does not load: $(.venv/bin/python -m harness.host.unbuilt "$name" "$version" "$log" "$PWD" "remove the folder ${2%/*}")"
}
for wheel in "${wheels[@]}"; do
  case $wheel in
    */horovod-*) loads horovod.torch "$wheel" ;;
    */deepspeed-*) loads deepspeed "$wheel" ;;
  esac
done
for name in $(unbuilt); do # remove the one of an earlier set-up, which was built for something else
  [[ $built == */plain_"$name"-* && ! -f .venv/.loads-$name.log ]] || pip uninstall --quiet --yes "$name" 2>/dev/null
done
echo "$want" >"$stamp"
[ -z "$(unbuilt)" ] || say "done, without what could not be built: $(unbuilt | paste -sd ' ') (.venv/bin/python -m bench doctor says why)"
