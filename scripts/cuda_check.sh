#!/usr/bin/env bash
# Checks the CUDA set-up on a machine without a GPU, in a separate checkout and environment (9 GB on disk, 9 GB to download):
# - torch's CUDA build from the package index
# - Horovod with NCCL: compiled and linked by the package index's compiler, and imported
# - DeepSpeed's compiled parts next to CUDA
# - all tests in tests/gpu
# - the matrix smoke on the CPU
# It checks tracked files as they are now, committed or not, and ignores untracked ones. cuda_check.sh --clear removes the environment.
set -euo pipefail
cd "$(dirname "$0")/.."

cache=${PARALLELISM_BENCH_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/parallelism-bench}
copy=$cache/cuda-check
say() { printf 'check: %s\n' "$*"; }
if [ "${1:-}" = --clear ]; then
  rm -rf "$copy"
  exit
fi

mkdir -p "$cache"
[ -d "$copy/.git" ] || git clone --quiet --no-hardlinks . "$copy"
git -C "$copy" fetch --quiet "$PWD" HEAD
git -C "$copy" reset --quiet --hard FETCH_HEAD
git diff --binary HEAD | git -C "$copy" apply --allow-empty
cd "$copy"
. scripts/package_index.sh

[ -x .venv/bin/python ] || "${PYTHON:-python3}" -m venv .venv
only_package_index .venv/bin/python
export PARALLELISM_BENCH_CUDA=packages

say "setting up $copy"
started=$SECONDS
PYTHON=${PYTHON:-python3} scripts/setup.sh
say "set-up took $((SECONDS - started)) s; the environment takes $(du -sh .venv | cut -f1)"
scripts/native.sh .venv/bin/python --plan
wheel=$(grep horovod- .venv/.wheels)
say "Horovod's wheel: $(stat --format %s "$wheel") bytes, $wheel"
cat "${wheel%/*}/built-for.txt"
.venv/bin/python -m tests.gpu.cuda_build
say "running tests/gpu"
.venv/bin/python -m pytest tests/gpu
say "running the matrix smoke on the CPU"
.venv/bin/python -m bench run --matrix smoke
say "everything passed; scripts/cuda_check.sh --clear frees $(du -sh "$copy" | cut -f1)"
