#!/usr/bin/env bash
# Creates .venv with pinned versions of all packages. Does nothing if it is up to date. Needs no root.
# setup.sh          retries libraries that failed to build before
# setup.sh --need   does not retry them; called before a run or a test
# setup.sh --tests  as root, also installs the programs that tests use; can be combined with --need
# setup.sh --light  leaves Horovod and DeepSpeed, which must be compiled, to the next set-up; can be combined with --need
set -euo pipefail
cd "$(dirname "$0")/.."

need_only=0 with_tests=0 light=0
for option in "$@"; do
  case $option in
    --need) need_only=1 ;;
    --tests) with_tests=1 ;;
    --light) light=1 ;;
    *) printf 'setup: unknown option %s: use --need, --tests or --light\n' "$option" >&2; exit 2 ;;
  esac
done
python=${PYTHON:-python3}
export CC=${CC:-gcc} CXX=${CXX:-g++}
say() { printf 'setup: %s\n' "$*"; }

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
  say "'$python' is not Python 3.10 or newer; install Debian's package python3, or name another interpreter with PYTHON=..." >&2
  exit 1
fi

# is_installed PACKAGE: whether a Debian package, or its equivalent from elsewhere, is installed.
is_installed() { case $1 in
  python3-venv) [ -x .venv/bin/python ] || "$python" -c 'import ensurepip, venv' 2>/dev/null ;;
  python3-dev) [ -f "$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] ;;
  libaio-dev) printf '#include <libaio.h>' | "$CXX" -E -x c++ - >/dev/null 2>&1 ;;
  libopenmpi-dev) command -v mpicxx >/dev/null ;;
  slurm-wlm) PATH=$PATH:/usr/sbin command -v slurmctld >/dev/null ;;
  munge) PATH=$PATH:/usr/sbin command -v munged >/dev/null ;;
  openmpi-bin) command -v mpirun >/dev/null ;;
  iproute2) PATH=$PATH:/usr/sbin:/sbin command -v tc >/dev/null ;;
  g++) command -v "$CXX" >/dev/null ;;
  *) command -v "$1" >/dev/null ;;
  esac; }
missing() { local name; for name in "$@"; do is_installed "$name" || echo "$name"; done; }
required=(git g++ make python3-dev python3-venv)
optional=(libaio-dev openmpi-bin libopenmpi-dev) # for DeepSpeed's offload to disk, Horovod over MPI, and Adasum
tests=(chromium slurm-wlm munge shellcheck iproute2) # tests that need them are skipped otherwise
[ $with_tests = 1 ] || tests=()
mapfile -t lack < <(missing "${required[@]}" "${optional[@]}" "${tests[@]}")
install() { DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null 2>&1; }
candidate() { [[ $(LC_ALL=C apt-cache policy "$1" 2>/dev/null) =~ Candidate:\ [^\(] ]]; } # whether the archive has the package
if [ ${#lack[@]} != 0 ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  apt-get -o Acquire::Retries=3 update -qq >/dev/null 2>&1 || say "apt-get update failed: Debian's archive may be unreachable" >&2
  offered=() absent=()
  for name in "${lack[@]}"; do if candidate "$name"; then offered+=("$name"); else absent+=("$name"); fi; done
  [ ${#absent[@]} = 0 ] || say "apt-get does not offer ${absent[*]}" >&2
  if [ ${#offered[@]} != 0 ]; then
    say "installing ${offered[*]}"
    install "${offered[@]}" || for name in "${offered[@]}"; do install "$name" || say "could not install $name" >&2; done
  fi
fi
mapfile -t lack < <(missing "${required[@]}")
if [ ${#lack[@]} != 0 ]; then
  say "needs the Debian packages ${lack[*]}; install them" >&2
  exit 1
fi
mapfile -t lack < <(missing "${optional[@]}")

# Processor to compile for: the caller's choice, else the last set-up's, else this machine's.
march=${PARALLELISM_BENCH_MARCH:-$(cat .venv/.march 2>/dev/null || echo native)}
export PARALLELISM_BENCH_MARCH=$march
if ! "$CXX" "-march=$march" -E -x c++ /dev/null >/dev/null 2>&1; then
  say "PARALLELISM_BENCH_MARCH=$march is not a processor that $CXX knows: use x86-64-v3, for example, or native for this machine's" >&2
  exit 2
fi

# How to build Horovod's GPU operations: the caller's choice, else the last set-up's, else what fits this machine.
. scripts/cuda.sh
cuda=${PARALLELISM_BENCH_CUDA:-$(cat .venv/.cuda 2>/dev/null || echo auto)}
export PARALLELISM_BENCH_CUDA=$cuda
case $cuda in
  auto) fits="$(nvidia_driver | sed 's/..*/a driver/') $(nvcc=$(cuda_compiler) && [ -z "$nvcc" ] || compiler_version "$nvcc" || true)" ;;
  toolkit | packages | no) fits=$cuda ;;
  *) say "unknown PARALLELISM_BENCH_CUDA=$cuda: use auto, toolkit, packages or no" >&2; exit 2 ;;
esac

# CUDA version of torch: the caller's choice, else the last set-up's, else what the driver supports. The default package index has builds for
# CUDA 12 (driver 525 or newer) up to torch 2.10, and for CUDA 13 (driver 580 or newer) from 2.11 on.
torch_cuda=${PARALLELISM_BENCH_TORCH_CUDA:-$(cat .venv/.torch-cuda 2>/dev/null || echo auto)}
major=$torch_cuda
case $torch_cuda in
  12 | 13) ;;
  auto)
    driver=$(nvidia_driver) major=13
    if [ -n "$driver" ] && [ "${driver%%.*}" -ge 525 ] && [ "${driver%%.*}" -lt 580 ]; then major=12; fi
    ;;
  *) say "unknown PARALLELISM_BENCH_TORCH_CUDA=$torch_cuda: use auto, 12 or 13" >&2; exit 2 ;;
esac

want=$({ cat pyproject.toml constraints.txt scripts/setup.sh scripts/cuda.sh scripts/native.sh; echo "${lack[@]}"; "$CXX" --version; echo "$march $fits $major"; } |
  sha256sum | cut -c1-16)
want=$want-$("$python" -c 'import sys; print(*sys.version_info[:3], sep=".")')
stamp=.venv/.set-up light_stamp=.venv/.set-up-light
unbuilt() { # prints the libraries that could not be built
  local file
  for file in .venv/share/parallelism-bench/unbuilt/*.json; do [ ! -f "$file" ] || basename "$file" .json; done
}
# identity PYTHON: prints what identifies a Python installation.
identity() { "$1" -c 'import sys; print(sys.version, sys.base_prefix)' 2>/dev/null || true; }
same=0
[ -n "$(identity .venv/bin/python)" ] && [ "$(identity .venv/bin/python)" = "$(identity "$python")" ] && same=1
if [ $same = 1 ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then
  [ -n "$(unbuilt)" ] || exit 0
  if [ $need_only = 1 ]; then
    say "some cells are unavailable because setup could not build $(unbuilt | paste -sd ' '); \`make setup\` retries, \`doctor\` says why"
    exit 0
  fi
fi
had_light=0 # whether everything except the compiled parts is up to date
if [ $same = 1 ] && [ -f "$light_stamp" ] && [ "$(cat "$light_stamp")" = "$want" ]; then
  had_light=1
  [ $light = 0 ] || exit 0
fi
[ ${#lack[@]} = 0 ] || say "some cells are unavailable without the Debian packages ${lack[*]}; install them and run this again" >&2
if [ -e .venv ] && [ ! -f .venv/pyvenv.cfg ] && [ -n "$(ls -A .venv)" ]; then
  say ".venv is not a virtual environment; move it away" >&2
  exit 1
fi
# Another CUDA needs a new environment: its packages have other names but share files, so removing the old ones would break the new ones.
[ "$(cat .venv/.torch-major 2>/dev/null || echo 13)" = "$major" ] || same=0
if [ $same = 0 ]; then
  if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    say "cannot create a virtual environment; install Debian's package python3-venv" >&2
    exit 1
  fi
  if [ -f .venv/pyvenv.cfg ]; then
    say "making .venv anew with $("$python" --version): its Python is another or is gone, or it was for another CUDA"
  else
    say "making .venv with $("$python" --version)"
  fi
  "$python" -m venv --clear .venv
fi
echo "$march" >.venv/.march
echo "$cuda" >.venv/.cuda
echo "$torch_cuda" >.venv/.torch-cuda
echo "$major" >.venv/.torch-major
constraints=constraints.txt
if [ "$major" = 12 ]; then # torch itself pins the CUDA libraries that it needs
  constraints=.venv/.constraints.txt
  { grep -vE '^(torch|triton)==' constraints.txt; echo torch==2.10.0; } >$constraints
  say "using torch 2.10, which is built for CUDA 12${driver:+, because driver $driver does not support CUDA 13} (PARALLELISM_BENCH_TORCH_CUDA=$torch_cuda)"
fi
# If pip is configured with folders that lack some packages, it warns about each of these.
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@" 2> >(grep -v "is ignored: it is neither a file nor a directory" >&2); }
if [ $had_light = 0 ]; then
  say "1/4 installing torch (the largest part)"
  pip install --quiet --no-compile --constraint $constraints setuptools torch
  scripts/machine.sh .venv/bin/python
  say "2/4 installing the suite, its tools and the strategies' libraries"
  pip install --quiet --constraint $constraints wheel cmake ninja
  pip install --quiet --no-compile --constraint $constraints --no-build-isolation --editable '.[dev]'
  PYTHONWARNINGS=ignore .venv/bin/python -m compileall -q -q -j 0 .venv/lib || true # on all cores; some packages contain files for other Python versions
  echo "$want" >"$light_stamp"
fi
if [ $light = 1 ]; then
  say "\`make setup\`, \`make run\` or \`make test\` will compile Horovod and DeepSpeed (5 minutes on 2 cores)"
  exit 0
fi
say "3/4 installing libraries without binary releases: Horovod, and DeepSpeed with its compiled parts"
built=$(scripts/native.sh .venv/bin/python)
mapfile -t wheels <<<"$built"
[ -z "$built" ] || pip install --quiet --constraint $constraints "${wheels[@]}"
if [ -n "$built" ] && [ "$built" != "$(cat .venv/.wheels 2>/dev/null)" ]; then # pip alone would keep an installed wheel of the same version
  pip install --quiet --no-deps --force-reinstall "${wheels[@]}"
fi
echo "$built" >.venv/.wheels
say "4/4 checking"
.venv/bin/python -c 'import torch, transformers, bench.cli; print("setup: torch", torch.__version__, "transformers", transformers.__version__)'
loads() { # loads MODULE WHEEL: treats a built library that cannot be imported as not built
  local name=${1%%.*} log=$PWD/.venv/.loads-${1%%.*}.log version=${2##*/}
  version=${version#*-} version=${version%%-*}
  if .venv/bin/python -c "import $1" >"$log" 2>&1; then rm "$log"; return; fi
  say "  $name does not load: $(.venv/bin/python -m harness.host.packages "$name" "$version" "$log" "$PWD" "remove the folder ${2%/*}")"
}
for wheel in "${wheels[@]}"; do
  case $wheel in
    */horovod-*) loads horovod.torch "$wheel" ;;
    */deepspeed-*) loads deepspeed "$wheel" ;;
  esac
done
for name in $(unbuilt); do # remove an earlier set-up's build, which was made for something else
  [[ $built == */plain_"$name"-* && ! -f .venv/.loads-$name.log ]] || pip uninstall --quiet --yes "$name" 2>/dev/null
done
echo "$want" >"$stamp"
[ -z "$(unbuilt)" ] || say "done, except libraries that could not be built: $(unbuilt | paste -sd ' ') (.venv/bin/python -m bench doctor says why)"
