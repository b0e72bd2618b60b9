#!/usr/bin/env bash
# machine.sh PYTHON: prints the versions and hardware that the set-up found. PYTHON needs torch.
set -euo pipefail

python=$1
say() { printf 'setup: %s\n' "$*"; }
# shellcheck source=scripts/cuda.sh
. "$(dirname "$0")/cuda.sh"

driver=$(nvidia_driver) nvcc=$(cuda_compiler)
toolkit=$([ -z "$nvcc" ] || compiler_version "$nvcc" || true)
read -r version cuda <<<"$("$python" -c 'import torch; print(torch.__version__, torch.version.cuda or "none")' 2>/dev/null)"

say "$("$python" --version), $("${CXX:-g++}" --version | head -n 1), $(uname -m)"
if [ "${PARALLELISM_BENCH_MARCH:-native}" = native ]; then
  say "compiling for this machine's processor; if a cluster has older ones, set PARALLELISM_BENCH_MARCH=x86-64-v3"
else
  say "compiling for the processor $PARALLELISM_BENCH_MARCH (PARALLELISM_BENCH_MARCH=native: this machine's)"
fi
say "NVIDIA driver ${driver:-none}, CUDA toolkit ${toolkit:+release }${toolkit:-none}${nvcc:+ ($nvcc)}, torch $version with CUDA $cuda"

case ${cuda%%.*} in # oldest driver for each major version of CUDA (CUDA Toolkit Release Notes)
  13) oldest=580 ;;
  12) oldest=525 ;;
  11) oldest=450 ;;
  *) oldest=0 ;;
esac
if [ -n "$driver" ] && [ "${driver%%.*}" -lt $oldest ]; then
  remedy="driver $oldest or newer"
  [ "${cuda%%.*}" != 13 ] || [ "${driver%%.*}" -lt 525 ] || remedy="$remedy, or run PARALLELISM_BENCH_TORCH_CUDA=12 make setup"
  say "this driver is too old for torch's CUDA $cuda, which needs $oldest or newer, so no GPU will be used: install $remedy"
fi
if [ -n "$driver" ] && [ "$cuda" = none ]; then
  say "this torch has no CUDA, so no GPU will be used: install it from an index with CUDA builds, such as the default one"
fi
