#!/usr/bin/env bash
# Builds the wheels that have no binary release, once for this Python, torch and CPU: native.sh PYTHON. Prints their folder on stdout.
set -euo pipefail
cd "$(dirname "$0")/.."

python=$(realpath --no-symlinks "$1")
PATH="$(dirname "$python"):$PATH" # ninja and cmake from the virtual environment
say() { printf 'setup: %s\n' "$*" >&2; }

has() { printf '#include <%s>\n' "$1" | g++ -E -x c++ - >/dev/null 2>&1; }
mpi=0 aio=0
command -v mpirun mpicxx >/dev/null && mpi=1
has libaio.h && aio=1
cpu=$(grep -m1 -E '^flags' /proc/cpuinfo | sha256sum | cut -c1-8)
key=$("$python" -c 'import sys, torch; print(f"py{sys.version_info[0]}{sys.version_info[1]}-torch{torch.__version__}")')-$cpu
cache=${PARALLELISM_BENCH_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/parallelism-bench}/wheels/$key

# wheel NAME VERSION SHA256 FOLDER "WHAT": builds FOLDER's wheel by the function build_NAME in its unpacked source, where it is not there yet.
wheel() {
  local name=$1 version=$2 sha=$3 folder=$4 what=$5
  if compgen -G "$folder/$name-$version-*.whl" >/dev/null; then return; fi
  say "$what, once; later set-ups take it from $folder"
  local work log started=$SECONDS
  work=$(mktemp -d) log=$(mktemp)
  "$python" -m pip --disable-pip-version-check download --quiet --no-deps --no-build-isolation --no-binary "$name" -d "$work" "$name==$version" >"$log" 2>&1 ||
    { cat "$log" >&2; say "cannot download the source release of $name $version"; exit 1; }
  if ! echo "$sha  $work/$name-$version.tar.gz" | sha256sum --check --quiet >/dev/null 2>&1; then
    say "the source release of $name $version has another checksum than $sha: not built"; exit 1
  fi
  tar -xzf "$work/$name-$version.tar.gz" -C "$work"
  (cd "$work/$name-$version" && "build_$name" "$work/out") >"$log" 2>&1 &
  local build=$!
  while kill -0 $build 2>/dev/null; do
    sleep 1
    [ $(((SECONDS - started) % 30)) != 0 ] || say "  $name: $((SECONDS - started)) s"
  done
  wait $build || { tail -n 40 "$log" >&2; say "building $name $version failed; the whole log is $log"; exit 1; }
  mkdir -p "$folder"
  cp "$work/out/"*.whl "$folder/.new.$$" && mv "$folder/.new.$$" "$folder/$(basename "$work/out/"*.whl)" # whole or not at all
  rm -rf "$work" "$log"
  say "  $name: built in $((SECONDS - started)) s"
}

build_horovod() { # torch's headers want C++17; Release leaves out 17 MB of debug symbols
  sed -i 's/set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD 17)/' CMakeLists.txt horovod/torch/CMakeLists.txt
  sed -i "s/'RelWithDebInfo'/'Release'/" setup.py
  local with_mpi=HOROVOD_WITHOUT_MPI=1
  [ $mpi = 0 ] || with_mpi=HOROVOD_WITH_MPI=1
  env MAKEFLAGS="-j$(nproc)" CMAKE_POLICY_VERSION_MINIMUM=3.5 HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
    HOROVOD_WITH_GLOO=1 "$with_mpi" "$python" -m pip wheel --no-deps --no-build-isolation -w "$1" .
}

build_deepspeed() { # its CPU builder forgets the libraries of an operation, so that async_io would lack libaio
  sed -i 's/extra_compile_args=compile_args)/extra_compile_args=compile_args, extra_link_args=self.strip_empty_entries(self.extra_ldflags()))/' \
    op_builder/cpu/builder.py
  env DS_ENABLE_NINJA=1 MAX_JOBS="$(nproc)" DS_ACCELERATOR=cpu DS_BUILD_CPU_ADAM=1 DS_BUILD_AIO=$aio \
    "$python" -m pip wheel --no-deps --no-build-isolation -w "$1" .
}

wheel horovod 0.28.1 92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0 "$cache/mpi$mpi" "building Horovod (2 minutes on 2 cores)"
wheel deepspeed 0.19.8 9e491abd0827ea5c389dd702e15e11e13d83d904bac4a20d6c2a4cb37207a9af "$cache/aio$aio" "building DeepSpeed's CPU Adam and disk access (4 minutes on 2 cores)"
ls "$cache/mpi$mpi"/horovod-*.whl "$cache/aio$aio"/deepspeed-*.whl
