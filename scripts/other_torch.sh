#!/usr/bin/env bash
# Runs the unit tests and the matrices smoke and quick with another torch, in a separate environment: several GB to download, then half an
# hour on 2 cores. The environment lacks Horovod and DeepSpeed's compiled parts, so cells that need them are unavailable. Variables:
# TORCH         version, such as 2.11.0
# TRANSFORMERS  version [default: the pinned one]
# PYTHON        interpreter [default: python3]
# VENV          virtual environment to use or create [default: one in the cache folder for each combination of versions]
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/package_index.sh

say() { printf 'other torch: %s\n' "$*"; }
torch=${TORCH:-} transformers=${TRANSFORMERS:-} python=${PYTHON:-python3}
version='^[0-9]+(\.[0-9]+)+$'
if ! [[ $torch =~ $version && ${transformers:-5.0} =~ $version ]]; then
  say "TORCH and TRANSFORMERS must be versions, as in: make test-torch TORCH=2.11.0 TRANSFORMERS=5.17.0" >&2
  exit 2
fi
cache=${PARALLELISM_BENCH_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/parallelism-bench}
venv=${VENV:-$cache/torch/$torch-transformers-${transformers:-pinned}-$("$python" -c 'import sys; print("py%d.%d" % sys.version_info[:2])')}
if [ ! -x "$venv/bin/python" ]; then
  say "creating $venv"
  mkdir -p "${venv%/*}"
  "$python" -m venv "$venv"
fi
python=$(realpath --no-symlinks "$venv/bin/python")
pip() { "$python" -m pip --disable-pip-version-check --quiet --quiet "$@"; }

# install: installs all packages at their pinned versions, except those whose versions torch or transformers require, and those built from source.
install() {
  local pins=$venv/pins.txt versions=$venv/constraints.txt
  grep -vE '^(#|(torch|triton|setuptools|cuda-[a-z]+|nvidia-(c|n[cv])[a-z0-9-]*|transformers|huggingface-hub|tokenizers|horovod)==)' \
    constraints.txt >"$pins"
  { cat "$pins" && echo "torch==$torch" && if [ -n "$transformers" ]; then echo "transformers==$transformers"; else grep ^transformers== constraints.txt; fi; } >"$versions"
  say "1/3 installing torch $torch"
  (only_package_index "$python" && pip install --no-compile --constraint "$versions" setuptools torch)
  say "2/3 installing the suite's dependencies at their pinned versions"
  pip install --no-compile --no-deps --no-build-isolation --requirement "$pins"
  say "3/3 installing transformers ${transformers:-as pinned}"
  pip install --no-compile --constraint "$versions" torch transformers
  PYTHONWARNINGS=ignore "$python" -m compileall -q -q -j 0 "$venv/lib" || true # on all cores; some packages contain files for other Python versions
}

want="$torch $transformers $(cat constraints.txt scripts/other_torch.sh | sha256sum)"
if [ "$(cat "$venv/.set-up" 2>/dev/null)" != "$want" ]; then
  install
  echo "$want" >"$venv/.set-up"
fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PARALLELISM_BENCH_UNTRIED=1
say "$("$python" -c 'import platform, torch, transformers; print("torch", torch.__version__, "transformers", transformers.__version__, "Python", platform.python_version())') in $venv"
failed=()
"$python" -m pytest tests/unit tests/gpu || failed+=("the tests")
for matrix in smoke quick; do
  "$python" -m bench run --matrix "$matrix" --results "$venv/results/$matrix" || failed+=("matrix $matrix")
done
if [ ${#failed[@]} != 0 ]; then
  say "failed: $(IFS=,; echo "${failed[*]}")" >&2
  exit 1
fi
say "all passed"
