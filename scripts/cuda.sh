# shellcheck shell=bash disable=SC2034,SC2154
# What this machine has for CUDA, and how Horovod's operations on GPUs are built with it. Sourced; callers set `python`, and `say` prints a line.
#
# PARALLELISM_BENCH_CUDA says what builds them: auto (where there is a driver: the machine's toolkit, else the packages), toolkit (the machine's),
# packages (the compiler and headers that the package index has), no (nothing: the CPU alone). Anything but auto also holds where no driver is
# found, as on a cluster's login node.

number='[0-9]+\.[0-9]+(\.[0-9]+)?'

nvidia_driver() { # its version; nothing: none
  nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | grep -oE "$number" | head -n 1 | grep . ||
    grep -oE "  $number" "${NVIDIA_VERSION_FILE:-/proc/driver/nvidia/version}" 2>/dev/null | head -n 1 | tr -d ' ' || true
}

cuda_compiler() { # the machine's nvcc; nothing: none
  local file
  for file in ${CUDA_HOME:+"$CUDA_HOME/bin/nvcc"} "$(command -v nvcc)" "${MACHINE_CUDA:-/usr/local/cuda}/bin/nvcc"; do
    if [ -n "$file" ] && [ -x "$file" ]; then echo "$file"; return; fi
  done
  true
}

compiler_version() { "$1" --version | grep -oE "release $number" | grep -oE "$number"; }

toolkit_home() { # the folder that a compiler belongs to: what is on the PATH may be a link or a script that starts another
  local top
  top=$("$1" --dryrun -x cu /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p' | head -n 1)
  if [ -x "$top/bin/nvcc" ]; then realpath "$top"; else dirname "$(dirname "$(realpath "$1")")"; fi
}

# choose_cuda: sets cuda_by (toolkit, packages or none), cuda_why (a clause on it), cuda_home (of the toolkit), and torch's cuda_version,
# nccl_version and cuda_capabilities.
# Machine code is made for the GPUs that torch's own is for: others could not run the rest of a training, and it is one small file.
choose_cuda() {
  local driver compiler version mode=${PARALLELISM_BENCH_CUDA:-auto}
  cuda_by=none cuda_home='' cuda_version='' nccl_version='' cuda_capabilities=''
  driver=$(nvidia_driver) compiler=$(cuda_compiler)
  read -r cuda_version nccl_version cuda_capabilities <<<"$("$python" -c '
import re, torch
nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda and torch.distributed.is_nccl_available() else "none"
print(torch.version.cuda or "none", nccl, ",".join(re.findall(r"\bsm_(\d+)\b", " ".join(torch.cuda.get_arch_list()))))' 2>/dev/null)" || true
  if [ "$mode" = no ]; then cuda_why="PARALLELISM_BENCH_CUDA=no"; return; fi
  if [ "${cuda_version:-none}" = none ]; then cuda_why="this torch has no CUDA"; return; fi
  if [ "$mode" = auto ] && [ -z "$driver" ]; then cuda_why="there is no NVIDIA driver (PARALLELISM_BENCH_CUDA=packages builds all the same)"; return; fi
  version=$([ -z "$compiler" ] || compiler_version "$compiler" || true)
  if [ "$mode" != packages ] && [ -n "$version" ] && [ "${version%%.*}" = "${cuda_version%%.*}" ]; then
    cuda_by=toolkit cuda_home=$(toolkit_home "$compiler") cuda_why="with the toolkit $cuda_home ($version)"
  elif [ "$mode" = toolkit ]; then
    cuda_why="PARALLELISM_BENCH_CUDA=toolkit, and the machine's is ${version:-missing} where torch has CUDA $cuda_version"
  elif [ "${cuda_version%%.*}" -lt 13 ]; then # those of CUDA 12 lie in folders of their own, which are no toolkit
    cuda_why="torch's CUDA $cuda_version needs a toolkit of its major version on this machine, which has ${version:-none}"
  else
    cuda_by=packages cuda_why="with the compiler that the package index has"
  fi
}

# unpack_toolkit FOLDER: the compiler and headers of torch's CUDA from the package index; sets cuda_home.
unpack_toolkit() {
  "$python" -m pip --disable-pip-version-check install --quiet --constraint "$project/constraints.txt" --target "$1" \
    "cuda-toolkit[nvcc,cccl]==$cuda_version.*" || return
  cuda_home=$1/nvidia/cu${cuda_version%%.*}
  ln -s lib "$cuda_home/lib64" # nvcc and CMake look there, and for the library without a version
  ln -s "libcudart.so.${cuda_version%%.*}" "$cuda_home/lib/libcudart.so"
}

# torchs_library NAME: the file of a library that this torch has loaded, such as nccl; nothing: none.
torchs_library() {
  "$python" -c 'import re, sys, torch; print(*sorted(set(re.findall(rf"/\S.*/lib{sys.argv[1]}\.so[.\d]*", open("/proc/self/maps").read()))), sep="\n")' \
    "$1" 2>/dev/null | head -n 1
}

# nccl_settings FOLDER: in Horovod's unpacked source; sets `nccl`, the variables that make it build its operations on GPUs with NCCL.
nccl_settings() {
  local runtime library known wanted=() capability
  [ "$cuda_by" != packages ] || unpack_toolkit "$1" || return
  # torch's headers want C++17 of nvcc too; nothing but development packages has libcuda.so without its version.
  sed -i 's/set(CMAKE_CUDA_STANDARD 11)/set(CMAKE_CUDA_STANDARD 17)/' horovod/common/ops/cuda/CMakeLists.txt
  sed -i 's/dlopen("libcuda.so"/dlopen("libcuda.so.1"/' horovod/torch/cuda_util.cc
  sed -i 's/cmake_args = \[/cmake_args = list(filter(None, os.environ["CMAKE_ARGS"].split(";"))) + [/' setup.py
  known=$("$cuda_home/bin/nvcc" --list-gpu-arch)
  for capability in ${cuda_capabilities//,/ }; do [[ $'\n'$known$'\n' != *$'\n'compute_"$capability"$'\n'* ]] || wanted+=("$capability"); done
  nccl=(HOROVOD_GPU=CUDA HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_NCCL_LINK=SHARED "HOROVOD_CUDA_HOME=$cuda_home" "CUDA_HOME=$cuda_home")
  nccl+=("PATH=$cuda_home/bin:$PATH" "HOROVOD_BUILD_CUDA_CC_LIST=$(IFS=,; echo "${wanted[*]}")")
  # The very libraries that torch has loaded, so that a process has one of each; they have no link without a version.
  runtime=$(torchs_library cudart) library=$(torchs_library nccl)
  nccl+=("CMAKE_ARGS=${runtime:+-DFOUND_LIB_cudart=$runtime};${library:+-DNCCL_LIBRARY=$library}")
  # Headers of cuBLAS and others, which torch's own include, where the toolkit has none.
  nccl+=("CPLUS_INCLUDE_PATH=${runtime:+${runtime%/*/*}/include}${CPLUS_INCLUDE_PATH:+:$CPLUS_INCLUDE_PATH}")
  [ ! -f "${library%/*/*}/include/nccl.h" ] || nccl+=("HOROVOD_NCCL_HOME=${library%/*/*}")
}

# no_cuda: in Horovod's unpacked source; keeps a build for the CPU alone from trying a toolkit that is in sight.
no_cuda() {
  sed -i 's/^if(CMAKE_CUDA_COMPILER)$/if(FALSE)/' CMakeLists.txt
  sed -i 's/torch.version.cuda is not None/False/' cmake/Modules/FindPytorch.cmake
}
