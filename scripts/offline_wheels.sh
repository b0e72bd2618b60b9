#!/usr/bin/env bash
# offline_wheels.sh [--native PYTHON] [FOLDER [PACKAGE...]]: fills FOLDER [default: wheels] with wheels for a GPU machine without a network:
# pydantic, the strategies' libraries and any further PACKAGEs, at the versions in constraints.txt. The GPU machine must already have torch, pandas,
# pyarrow, scipy, matplotlib, typer, rich, accelerate and what transformers needs. Run this where pip reaches a package index. It first removes
# all wheels from FOLDER.
# On the offline machine:
#   python3 -m pip install --no-index --no-deps --target DIR FOLDER/*.whl
#   PYTHONPATH=DIR python3 -m bench run --matrix gpu --results RESULTS
#
# --native PYTHON   also builds Horovod with NCCL and DeepSpeed's host Adam and disk access with scripts/native.sh (25 minutes on one core).
#                   PYTHON: interpreter of an environment with the offline machine's versions of Python and torch; nothing is installed into it.
#                   Without --native, Horovod's cells and DeepSpeed's cells with offloading are unavailable on the offline machine.
# Environment variables:
# OFFLINE_PYTHON     the offline machine's Python [default: 3.12]
# OFFLINE_CUDA       CUDA version of the bitsandbytes kernels to include [default: 130]
# OFFLINE_LIMIT_MIB  total size above which the script fails [default: 60]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
offline_python=${OFFLINE_PYTHON:-3.12} cuda=${OFFLINE_CUDA:-130} limit=${OFFLINE_LIMIT_MIB:-60}
say() { printf 'offline: %s\n' "$*"; }
native=''
if [ "${1:-}" = --native ]; then
  native=${2:?--native needs a Python with torch}
  "$native" -c 'import torch' 2>/dev/null || { say "$native cannot import torch" >&2; exit 2; }
  shift 2
fi
folder=${1:-wheels}
shift $(($# > 0))

pins() { # pins NAME...: prints NAME==VERSION as in constraints.txt for the offline machine's Python
  local name lines
  for name in "$@"; do
    mapfile -t lines < <(grep -E "^$name==" constraints.txt | sed 's/;.*//; s/ //g')
    [ ${#lines[@]} != 0 ] || { say "constraints.txt has no $name" >&2; return 1; }
    if [ "$offline_python" = 3.10 ]; then echo "${lines[-1]}"; else echo "${lines[0]}"; fi
  done
}
quiet() { "$@" 2> >(grep -v WARNING >&2 || true); }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$folder"
rm -f "$folder"/*.whl "$folder"/libaio.so.1

say "1/3 wheels from the package index, for Python $offline_python"
platforms=()
for tag in manylinux_2_34 manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014 manylinux1; do
  platforms+=(--platform "${tag}_x86_64")
done
mapfile -t telemetry < <(grep -oE '^(opentelemetry-[a-z-]+|googleapis-common-protos)' constraints.txt) # torchft imports them
mapfile -t wanted < <(pins pydantic pydantic-core annotated-types typing-inspection typing-extensions nvidia-ml-py transformers \
  hjson einops msgpack py-cpuinfo peft torchao torchft bitsandbytes "${telemetry[@]}" "$@")
wait $! # fails if a package has no pin
quiet "$python" -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --python-version "$offline_python" \
  --implementation cp "${platforms[@]}" -d "$folder" "${wanted[@]}"
"$python" scripts/slim_wheel.py "$folder"/bitsandbytes-*.whl "cuda$cuda" _cpu.so # one machine needs only 4 of the 43 MiB

say "2/3 pure wheels of fairscale and DeepSpeed, which have only source releases"
"$python" -m venv "$work/venv"
mapfile -t tools < <(pins setuptools wheel packaging)
quiet "$work/venv/bin/python" -m pip install -q --disable-pip-version-check "${tools[@]}"
for name in fairscale deepspeed; do
  export DS_BUILD_OPS=0 DS_ACCELERATOR=cpu
  quiet "$work/venv/bin/python" -m pip download -q --disable-pip-version-check --no-deps --no-build-isolation --no-binary :all: \
    -d "$work/sdist" "$(pins $name)"
  tar -xzf "$work/sdist/$name"-*.tar.gz -C "$work"
  (cd "$work/$name"-*/ && "$work/venv/bin/python" -m pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation -w "$work/out" .)
  unset DS_BUILD_OPS DS_ACCELERATOR
done
cp "$work"/out/*.whl "$folder/"

if [ -n "$native" ]; then
  say "3/3 Horovod with NCCL and DeepSpeed with its host Adam, for $("$native" -c 'import torch; print("torch", torch.__version__)')"
  mapfile -t tools < <(pins setuptools wheel cmake ninja packaging pydantic pydantic-core annotated-types typing-inspection typing-extensions \
    hjson py-cpuinfo einops msgpack tqdm cloudpickle psutil pyyaml cffi pycparser)
  quiet "$python" -m pip --python "$native" install -q --disable-pip-version-check --no-deps --target "$work/tools" "${tools[@]}"
  env PYTHONPATH="$work/tools" PATH="$work/tools/bin:$PATH" PARALLELISM_BENCH_CUDA="${PARALLELISM_BENCH_CUDA:-packages}" \
    PARALLELISM_BENCH_MPI=no PARALLELISM_BENCH_MARCH="${PARALLELISM_BENCH_MARCH:-x86-64-v3}" \
    scripts/native.sh "$native" >"$work/built"
  while read -r wheel; do
    name=${wheel##*/}
    rm -f "$folder/${name%%-*}"-*.whl
    cp "$wheel" "$folder/"
    "$python" scripts/slim_wheel.py "$folder/$name" --strip # 19 of DeepSpeed's 21 MiB are debug symbols
  done <"$work/built"
  libaio=$(PATH=$PATH:/usr/sbin:/sbin ldconfig -p | awk '/libaio\.so\.1 .*x86-64/ {print $NF; exit}')
  if [ -n "$libaio" ]; then # in Ubuntu 24.04 it has another name
    cp -L "$libaio" "$folder/libaio.so.1"
    say "DeepSpeed's disk access needs: export LD_LIBRARY_PATH=$folder"
  fi
else
  say "3/3 skipped: Horovod and DeepSpeed's compiled parts (--native PYTHON builds them)"
fi

twice=$(find "$folder" -name '*.whl' -printf '%f\n' | sed 's/-.*//' | sort | uniq -d)
[ -z "$twice" ] || { say "two wheels of $twice in $folder: remove one, or pip will install nothing" >&2; exit 1; }
bytes=$(cat "$folder"/* | wc -c)
say "$(find "$folder" -name '*.whl' | wc -l) wheels, $(awk -v n="$bytes" 'BEGIN {printf "%.1f", n / 2^20}') MiB in $folder"
[ "$bytes" -le $((limit * 2**20)) ] || { say "more than $limit MiB: leave a wheel out, or raise OFFLINE_LIMIT_MIB" >&2; exit 1; }
