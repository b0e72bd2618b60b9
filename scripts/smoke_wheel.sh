#!/usr/bin/env bash
# smoke_wheel.sh WHEEL: installs a wheel without a checkout and without torch into an empty environment, and tries the commands that need neither.
set -euo pipefail
wheel=$(realpath "${1:?wheel}") results=$(realpath "$(dirname "$0")/../results/reference") work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip --disable-pip-version-check install --quiet "$wheel"
cp -r "$results" results
bench() { env -u PYTHONPATH venv/bin/parallelism-bench "$@" >out || { cat out; exit 1; }; }
bench submit --matrix smoke --nodes 2 --dry-run
script=$(sed -n "s/^export BENCH_SCRIPTS='*\\([^']*\\)'*$/\\1/p" out)
test -f "$script/lib.sh" && test -f "$script/multinode.sbatch" && test -f "$script/nightly.sbatch"
bench submit --nightly --dry-run
bench report --results results --out report.html
bench report --index --results results --out index.html
bench compare --cells ddp fsdp2 --results results
bench compare --history --results results
bench plan --model llama-8b --gpus '8 x h100'
bench fits llama-8b --gpus '2 x rtx-4090' --method qlora
bench list matrices
echo "the wheel works without a checkout"
