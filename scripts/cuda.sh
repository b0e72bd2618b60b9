# shellcheck shell=bash disable=SC2034,SC2154
# Finds this machine's driver and CUDA toolkit, and prepares Horovod's GPU build. To be sourced by a script that sets `python` and defines
# `say`, which prints a line.
#
# PARALLELISM_BENCH_CUDA chooses the compiler:
#   toolkit   the machine's
#   packages  compiler and headers from the package index
#   no        none; Horovod is built for the CPU alone
#   auto      with a driver, the machine's toolkit if it fits torch, else the packages; without a driver, none
# All but `auto` also work without a driver, for example on a cluster's login node.

number='[0-9]+\.[0-9]+(\.[0-9]+)?'

nvidia_driver() { # prints the driver's version, or nothing if there is no driver
  nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | grep -oE "$number" | head -n 1 | grep . ||
    grep -oE "  $number" "${NVIDIA_VERSION_FILE:-/proc/driver/nvidia/version}" 2>/dev/null | head -n 1 | tr -d ' ' || true
}

cuda_compiler() { # prints the path of the machine's nvcc, or nothing if there is none
  local file
  for file in ${CUDA_HOME:+"$CUDA_HOME/bin/nvcc"} "$(command -v nvcc)" "${MACHINE_CUDA:-/usr/local/cuda}/bin/nvcc"; do
    if [ -n "$file" ] && [ -x "$file" ]; then echo "$file"; return; fi
  done
  true
}

compiler_version() { "$1" --version | grep -oE "release $number" | grep -oE "$number"; }

toolkit_home() { # prints the toolkit folder of a compiler, which may be a link or a script that starts another
  local top
  top=$("$1" --dryrun -x cu /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p' | head -n 1)
  if [ -x "$top/bin/nvcc" ]; then realpath "$top"; else dirname "$(dirname "$(realpath "$1")")"; fi
}

# choose_cuda: sets cuda_by (toolkit, packages or none), cuda_why (the reason, as a clause), cuda_home (the toolkit's folder), and torch's
# cuda_version, nccl_version and cuda_capabilities.
# Horovod gets machine code for the same GPUs as torch, because nothing else in a training would run on other GPUs.
choose_cuda() {
  local driver compiler version mode=${PARALLELISM_BENCH_CUDA:-auto}
  cuda_by=none cuda_home='' cuda_version='' nccl_version='' cuda_capabilities=''
  driver=$(nvidia_driver) compiler=$(cuda_compiler)
  read -r cuda_version nccl_version cuda_capabilities <<<"$("$python" -c '
import re, torch
from harness.host.environment import architectures
nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda and torch.distributed.is_nccl_available() else "none"
print(torch.version.cuda or "none", nccl, ",".join(re.findall(r"\bsm_(\d+)\b", " ".join(architectures()))))' 2>/dev/null)" || true
  if [ "$mode" = no ]; then cuda_why="PARALLELISM_BENCH_CUDA=no"; return; fi
  if [ "${cuda_version:-none}" = none ]; then cuda_why="this torch has no CUDA"; return; fi
  if [ "$mode" = auto ] && [ -z "$driver" ]; then cuda_why="there is no NVIDIA driver (PARALLELISM_BENCH_CUDA=packages builds anyway)"; return; fi
  version=$([ -z "$compiler" ] || compiler_version "$compiler" || true)
  if [ "$mode" != packages ] && [ -n "$version" ] && [ "${version%%.*}" = "${cuda_version%%.*}" ]; then
    cuda_by=toolkit cuda_home=$(toolkit_home "$compiler") cuda_why="with the toolkit $cuda_home ($version)"
  elif [ "$mode" = toolkit ]; then
    cuda_why="PARALLELISM_BENCH_CUDA=toolkit, but the machine's is ${version:-missing} and torch has CUDA $cuda_version"
  elif [ "${cuda_version%%.*}" -lt 13 ]; then # CUDA 12's packages install into separate folders, which do not form a toolkit
    cuda_why="torch's CUDA $cuda_version needs a toolkit of its major version on this machine, which has ${version:-none}"
  else
    cuda_by=packages cuda_why="with the compiler that the package index has"
  fi
}

# unpack_toolkit FOLDER: installs compiler and headers of torch's CUDA version from the package index; sets cuda_home.
unpack_toolkit() {
  "$python" -m pip --disable-pip-version-check install --quiet --constraint "$project/constraints.txt" --target "$1" \
    "cuda-toolkit[nvcc,cccl]==$cuda_version.*" || return
  cuda_home=$1/nvidia/cu${cuda_version%%.*}
  ln -s lib "$cuda_home/lib64" # nvcc and CMake look in lib64 for a library without a version in its name
  ln -s "libcudart.so.${cuda_version%%.*}" "$cuda_home/lib/libcudart.so"
}

# torchs_library NAME: prints the path of a library that this torch loads, such as nccl, or nothing if it does not.
torchs_library() {
  "$python" -c 'import re, sys, torch; print(*sorted(set(re.findall(rf"/\S.*/lib{sys.argv[1]}\.so[.\d]*", open("/proc/self/maps").read()))), sep="\n")' \
    "$1" 2>/dev/null | head -n 1
}

# nccl_settings FOLDER: to be called in Horovod's unpacked source. Sets `nccl` to the variables that make Horovod build its GPU operations.
nccl_settings() {
  local runtime library known wanted=() capability
  [ "$cuda_by" != packages ] || unpack_toolkit "$1" || return
  # torch's headers need C++17 from nvcc too. Only development packages contain libcuda.so without a version in its name.
  sed -i 's/set(CMAKE_CUDA_STANDARD 11)/set(CMAKE_CUDA_STANDARD 17)/' horovod/common/ops/cuda/CMakeLists.txt
  sed -i 's/dlopen("libcuda.so"/dlopen("libcuda.so.1"/' horovod/torch/cuda_util.cc
  sed -i 's/cmake_args = \[/cmake_args = list(filter(None, os.environ["CMAKE_ARGS"].split(";"))) + [/' setup.py
  known=$("$cuda_home/bin/nvcc" --list-gpu-arch)
  for capability in ${cuda_capabilities//,/ }; do [[ $'\n'$known$'\n' != *$'\n'compute_"$capability"$'\n'* ]] || wanted+=("$capability"); done
  nccl=(HOROVOD_GPU=CUDA HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_NCCL_LINK=SHARED "HOROVOD_CUDA_HOME=$cuda_home" "CUDA_HOME=$cuda_home")
  nccl+=("PATH=$cuda_home/bin:$PATH" "HOROVOD_BUILD_CUDA_CC_LIST=$(IFS=,; echo "${wanted[*]}")")
  # Names the files that torch loads, so that a process loads each library once. They have no link without a version.
  runtime=$(torchs_library cudart) library=$(torchs_library nccl)
  nccl+=("CMAKE_ARGS=${runtime:+-DFOUND_LIB_cudart=$runtime};${library:+-DNCCL_LIBRARY=$library}")
  # torch's headers include those of cuBLAS and other libraries, which the toolkit may lack.
  nccl+=("CPLUS_INCLUDE_PATH=${runtime:+${runtime%/*/*}/include}${CPLUS_INCLUDE_PATH:+:$CPLUS_INCLUDE_PATH}")
  [ ! -f "${library%/*/*}/include/nccl.h" ] || nccl+=("HOROVOD_NCCL_HOME=${library%/*/*}")
}

# no_cuda: to be called in Horovod's unpacked source. Keeps a CPU-only build from using an installed toolkit.
no_cuda() {
  sed -i 's/^if(CMAKE_CUDA_COMPILER)$/if(FALSE)/' CMakeLists.txt
  sed -i 's/torch.version.cuda is not None/False/' cmake/Modules/FindPytorch.cmake
}
