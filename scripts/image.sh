#!/usr/bin/env bash
# image.sh CUDA MARCH: sets up the suite in an image, as root, and removes files that only the set-up needed.
# CUDA   no: torch for CPUs; 12 or 13: torch for this CUDA; needs no driver
# MARCH  oldest processor that can run the image, such as x86-64-v3
set -euo pipefail
cd "$(dirname "$0")/.."
case ${1:-} in
  no) export PARALLELISM_BENCH_CUDA=no PIP_EXTRA_INDEX_URL=${PIP_EXTRA_INDEX_URL:-https://download.pytorch.org/whl/cpu} ;;
  12) export PARALLELISM_BENCH_CUDA=no PARALLELISM_BENCH_TORCH_CUDA=12 ;; # Horovod's GPU build needs CUDA 13's packages
  13) export PARALLELISM_BENCH_CUDA=packages PARALLELISM_BENCH_TORCH_CUDA=13 ;;
  *) echo "image: unknown CUDA '${1:-}': use no, 12 or 13" >&2; exit 2 ;;
esac
rm -rf .venv # the checkout's, which Apptainer copies
cache=$(mktemp -d)
PARALLELISM_BENCH_MARCH=${2:?processor} PARALLELISM_BENCH_CACHE=$cache PIP_NO_CACHE_DIR=1 scripts/setup.sh
rm -rf "$cache" /var/lib/apt/lists/*
