#!/usr/bin/env bash
# native.sh PYTHON: builds wheels of Horovod and DeepSpeed, which have no binary releases, once for each kind of machine. Prints the wheels'
# paths, one per line. If a library cannot be built, leaves it out and records the reason in the Python environment, where plans find it.
# native.sh PYTHON --plan: only prints what Horovod would be built for on this machine.
set -euo pipefail
cd "$(dirname "$0")/.."
project=$PWD
# shellcheck source=scripts/cuda.sh
. scripts/cuda.sh

python=$(realpath --no-symlinks "$1")
export PATH="${python%/*}:$PATH" CC="${CC:-gcc}" CXX="${CXX:-g++}" # ninja and cmake from the virtual environment
march=${PARALLELISM_BENCH_MARCH:-native}
choose_cuda
if [ "${2:-}" = --plan ]; then
  if [ "$cuda_by" = none ]; then
    echo "Horovod for the CPU alone: $cuda_why"
  else
    echo "Horovod with NCCL $nccl_version for CUDA $cuda_version, $cuda_why, for GPUs $cuda_capabilities"
  fi
  exit
fi
wheels=${PARALLELISM_BENCH_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/parallelism-bench}/wheels
say() { printf 'setup: %s\n' "$*" >&2; }
mkdir -p "$wheels" || { say "cannot write $wheels; set PARALLELISM_BENCH_CACHE to another folder"; exit 1; }

has() { printf '#include <%s>\n' "$1" | "$CXX" -E -x c++ - >/dev/null 2>&1; }
mpi=none aio=0
[ "${PARALLELISM_BENCH_MPI:-}" != no ] && command -v mpirun >/dev/null && command -v mpicxx >/dev/null &&
  mpi=$(mpicxx -show 2>/dev/null || echo unknown)
has libaio.h && aio=1
cuda=none # describes what Horovod's GPU operations are built with
[ "$cuda_by" = none ] || cuda="$cuda_version, $cuda_why, NCCL $nccl_version, GPUs $cuda_capabilities"

# --- Horovod ---------------------------------------------------------------------------------------------------------

build_horovod() { # build_horovod FOLDER: to be called in the unpacked source; writes the wheel to FOLDER
  # torch's headers need C++17. A Release build omits 17 MB of debug symbols.
  sed -i 's/set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD 17)/' CMakeLists.txt horovod/torch/CMakeLists.txt
  sed -i "s/'RelWithDebInfo'/'Release'/" setup.py
  # Horovod's copy of flatbuffers assigns to a const member, an error since GCC 14, in an operator without a return statement.
  sed -i 's/^  const size_type count_;/  size_type count_;/; s/^    count_ = other.count_;/&\n    return *this;/' \
    third_party/flatbuffers/include/flatbuffers/stl_emulation.h
  # Python 3.12 removed distutils.
  sed -i "s/from distutils.sysconfig import get_python_inc; print(get_python_inc())/import sysconfig; print(sysconfig.get_path('include'))/" \
    horovod/torch/CMakeLists.txt
  local with=(HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_GLOO=1)
  if [ "$cuda" = none ]; then
    no_cuda
  else
    local nccl
    nccl_settings "${1%/*}/toolkit" || return
    with+=("${nccl[@]}")
  fi
  if [ "$mpi" = none ]; then with+=(HOROVOD_WITHOUT_MPI=1); else with+=(HOROVOD_WITH_MPI=1); fi
  [ "$march" = native ] || with+=("HOROVOD_BUILD_ARCH_FLAGS=-march=$march") # by default Horovod uses this processor's AVX, F16C and FMA
  # Horovod uses std::string, std::logic_error and sized integers without their headers, which others include only before GCC 13, 14 and 15.
  with+=("CXXFLAGS=-include string -include stdexcept -include cstdint ${CXXFLAGS:-}")
  env MAKEFLAGS="-j$(nproc)" CMAKE_POLICY_VERSION_MINIMUM=3.5 "${with[@]}" \
    "$python" -m pip wheel --no-deps --no-build-isolation -w "$1" .
}

build_plain_horovod() { build_horovod "$1"; } # for the CPU alone, if the build with NCCL fails

# --- DeepSpeed -------------------------------------------------------------------------------------------------------

# Otherwise DeepSpeed's setup.py, which also runs on download, asks an installed CUDA toolkit for its version and fails. The parts built here run
# on the host.
export DS_ACCELERATOR=cpu TORCH_CUDA_ARCH_LIST=8.0

build_deepspeed() {
  # DeepSpeed's CPU builder does not link an operation's libraries, so async_io would lack libaio.
  sed -i 's/extra_compile_args=compile_args)/extra_compile_args=compile_args, extra_link_args=self.strip_empty_entries(self.extra_ldflags()))/' \
    op_builder/cpu/builder.py
  # Debug information takes a third of the compile time and nine tenths of the wheel.
  sed -i "s/'-O3', '-g', /'-O3', '-g0', /" op_builder/cpu/builder.py
  # 14 files parse torch's whole C++ interface but use only tensors and the Python binding.
  grep -rlZ 'torch/extension.h' csrc/adam csrc/aio csrc/pin_memory csrc/includes |
    xargs -0 sed -i 's|#include <torch/extension.h>|#include <torch/types.h>\n#include <torch/csrc/utils/pybind.h>|'
  # DeepSpeed always compiles for this machine's processor, so replace the compiler's flag and the choice of vector instructions.
  if [ "$march" != native ]; then
    sed -i "s/^    def cpu_arch(self):/&\n        return '-march=$march'/; s/^    def simd_width(self):/&\n        return '$(vectors)'/" \
      op_builder/builder.py
  fi
  env DS_ENABLE_NINJA=1 MAX_JOBS="$(nproc)" DS_ACCELERATOR=cpu DS_BUILD_CPU_ADAM=1 DS_BUILD_AIO=$aio \
    "$python" -m pip wheel --no-deps --no-build-isolation -w "$1" .
}

vectors() { # prints DeepSpeed's flag for the widest vector instructions that $march has
  local macros
  macros=$("$CXX" "-march=$march" -dM -E -x c++ /dev/null)
  case $macros in
    *__AVX512F__*) echo -D__AVX512__ ;;
    *__AVX2__*) echo -D__AVX256__ ;;
    *__ARM_FEATURE_SVE*) echo -D__SVE__ ;;
    *__aarch64__*) echo -D__NEON__ ;;
    *) echo -D__SCALAR__ ;;
  esac
}

build_plain_deepspeed() { # without compiled parts, which only offloaded states need
  env DS_BUILD_OPS=0 DS_ACCELERATOR=cpu "$python" -m pip wheel --no-deps --no-build-isolation -w "$1" .
}

# ---------------------------------------------------------------------------------------------------------------------

label=$("$python" -c 'import sys, torch; print(f"py{sys.version_info[0]}{sys.version_info[1]}-torch{torch.__version__}")')-$march

# built_for RECIPE: prints everything the wheel depends on, one item per line. Any change makes a new wheel.
built_for() {
  printf '%s\n' "$label" "$("$CXX" --version | head -n 1)" "$(getconf GNU_LIBC_VERSION 2>/dev/null)"
  [ "$march" != native ] || printf 'processor %s\n' "$("$CXX" -march=native -dM -E -x c++ /dev/null | sort | sha256sum)" # its instruction sets
  [ "${1#plain_}" != horovod ] || printf 'mpi %s\ncuda %s\nrecipe %s\n' "$mpi" "$cuda" \
    "$(declare -f build_horovod no_cuda unpack_toolkit nccl_settings | sha256sum)"
  [ "$1" != deepspeed ] || printf 'libaio %s\n' "$aio"
  printf 'recipe %s\n' "$(declare -f "build_$1" | sha256sum)"
}

# wheel RECIPE NAME VERSION SHA256 WHAT: prints the path of this release's wheel. If it is missing, build_RECIPE builds it. If that fails, records
# the reason and returns 1.
wheel() {
  local recipe=$1 name=$2 version=$3 sha=$4 what=$5 fits folder work log started=$SECONDS
  fits=$(built_for "$recipe")
  folder=$wheels/$recipe-$version/$label-$(sha256sum <<<"$fits" | cut -c1-10)
  if compgen -G "$folder/$name-$version*.whl"; then return; fi
  say "$what, once; later set-ups reuse it from $folder"
  mkdir -p "$folder"
  work=$(mktemp -d) log=$folder/build.log
  if ! "$python" -m pip --disable-pip-version-check download --quiet --no-deps --no-build-isolation --no-binary "$name" -d "$work" "$name==$version" \
    >"$log" 2>&1; then
    failed "cannot download its source release" "let pip reach a package index with $name $version"
    return 1
  fi
  if ! echo "$sha  $work/$name-$version.tar.gz" | sha256sum --check --quiet >/dev/null 2>&1; then
    echo "ERROR: the source release's checksum is not $sha" >"$log"
    failed "not built" "use a package index that serves the original release"
    return 1
  fi
  tar -xzf "$work/$name-$version.tar.gz" -C "$work"
  (cd "$work/$name-$version" && "build_$recipe" "$work/out") >"$log" 2>&1 &
  local build=$!
  while kill -0 $build 2>/dev/null; do
    sleep 1
    [ $(((SECONDS - started) % 30)) != 0 ] || say "  $name: $((SECONDS - started)) s"
  done
  if ! wait $build; then
    failed "build failed" "fix that, or use another compiler (CC=gcc-12 CXX=g++-12 make setup)"
    return 1
  fi
  echo "$fits" >"$folder/built-for.txt"
  if ! { cp "$work/out/"*.whl "$folder/.new.$$" && mv "$folder/.new.$$" "$folder/$(basename "$work/out/"*.whl)"; }; then # so that an interrupted copy leaves no wheel
    echo "ERROR: cannot write into $folder" >"$log"
    failed "cannot save its wheel" "free space there, or set PARALLELISM_BENCH_CACHE to another folder"
    return 1
  fi
  rm -rf "$work"
  say "  $name: built in $((SECONDS - started)) s"
  compgen -G "$folder/$name-$version*.whl"
}

failed() { # failed WHAT REMEDY: records the reason; uses the variables of its caller, `wheel`
  say "  $name $version: $1: $("$python" -m harness.host.packages "$name" "$version" "$log" "$work" "$2")"
  say "  cells that need it are unavailable, everything else continues; full log: $log"
  rm -rf "$work"
}

forget() { rm -f "$("$python" -m harness.host.packages "$1")"; } # removes the reason that an earlier set-up recorded

release=(horovod 0.28.1 92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0)
forget horovod
if [ "$cuda" = none ]; then
  say "Horovod for the CPU alone: $cuda_why"
  wheel horovod "${release[@]}" "building Horovod (2 minutes on 2 cores)" || true
else
  say "Horovod with NCCL for CUDA $cuda_version, $cuda_why"
  wheel horovod "${release[@]}" "building Horovod with NCCL (5 minutes on 2 cores)" || {
    cuda=none
    wheel plain_horovod "${release[@]}" "building Horovod for the CPU alone (2 minutes on 2 cores)" || true
  }
fi
release=(deepspeed 0.19.8 9e491abd0827ea5c389dd702e15e11e13d83d904bac4a20d6c2a4cb37207a9af)
forget deepspeed
wheel deepspeed "${release[@]}" "building DeepSpeed's CPU Adam and disk access (3 minutes on 2 cores)" ||
  wheel plain_deepspeed "${release[@]}" "building DeepSpeed without compiled parts" || true
