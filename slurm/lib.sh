# shellcheck shell=bash
# Functions of all jobs. Reads BENCH_* variables, which `python -m bench submit` sets from the site file; each has a default.

BENCH_MATRIX=${BENCH_MATRIX:-smoke}
BENCH_RESULTS=${BENCH_RESULTS:-results}
BENCH_WORK=${BENCH_WORK:-$BENCH_RESULTS/slurm}
BENCH_NODES=${BENCH_NODES:-${SLURM_JOB_NUM_NODES:-1}}
BENCH_PYTHON=${BENCH_PYTHON:-.venv/bin/python}
mkdir -p "$BENCH_WORK"
chmod 700 "$BENCH_WORK"

say() { printf '%s %s\n' "$(date +%H:%M:%S)" "$*"; }

# Lists of words, quoted for a shell.
container=() more_srun=() more_options=()
eval "container=(${BENCH_CONTAINER:-}) more_srun=(${BENCH_SRUN:-}) more_options=(${BENCH_OPTIONS:-})"
python=("${container[@]}" "$BENCH_PYTHON")
bench() { "${python[@]}" -m bench "$@"; }

# Prints the id of this job's run, the same after a requeue and for all tasks of an array.
run_of_job() {
  local file id
  file=$BENCH_WORK/run-${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}
  id=$(date -u +%Y%m%dT%H%M%S)-$(printf %04x $((${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID} % 65536)))
  (set -o noclobber; echo "$id" >"$file") 2>/dev/null || true # the first task to get here chooses it
  cat "$file"
}
BENCH_RUN=${BENCH_RUN:-$(run_of_job)}

# Keeps the agent of one node running: starts it again where it, its job step or its node was lost, until the run has ended or the agent
# ends with exit code 0 (the coordinator has said that all is done) or 2 (it cannot work). The coordinator is the process `bench run`.
keep_agent() { # RENDEZVOUS NUMBER NAME
  local step='' code options=(--nodes=1 --ntasks=1 --nodelist="$3" --overlap --mpi=none --cpu-bind=none)
  options+=(--cpus-per-task="${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_ON_NODE:-1}}")
  trap '[ -z "$step" ] || kill "$step" 2>/dev/null; exit 1' TERM
  while [ ! -e "$1.over" ] && kill -0 $$ 2>/dev/null; do # $$ is the shell of the batch step, whose children not every SLURM kills
    srun "${options[@]}" "${more_srun[@]}" "${python[@]}" -m harness.agent "$1" --node "$2" ${BENCH_INTERFACE:+--interface "$BENCH_INTERFACE"} &
    step=$!
    wait "$step"
    code=$?
    case $code in 0 | 2) return ;; esac
    sleep 1
  done
}

# Starts keep_agent for each node for which it does not run.
start_agents() { # RENDEZVOUS
  local name number=0
  for name in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
    if ! kill -0 "${agents[number]:-0x}" 2>/dev/null; then
      keep_agent "$1" "$number" "$name" &
      agents[number]=$!
    fi
    number=$((number + 1))
  done
}

# Waits up to 5 seconds for the agents to end, as most do by themselves, and kills the others.
end_agents() { # RENDEZVOUS
  local one tries=50
  touch "$1.over"
  for one in "${agents[@]}"; do
    while kill -0 "$one" 2>/dev/null && [ $tries -gt 0 ]; do
      sleep 0.1
      tries=$((tries - 1))
    done
    kill "$one" 2>/dev/null
  done
  rm -f "$1" "$1.over"
}

# Puts the job back into the queue, to continue where it stopped, up to BENCH_REQUEUES times.
requeue() {
  if [ "${SLURM_RESTART_COUNT:-0}" -ge "${BENCH_REQUEUES:-20}" ]; then
    say "requeued ${SLURM_RESTART_COUNT} times already: a trial may need longer than the time limit of the job"
    exit 1
  fi
  say "the current trial is recorded as interrupted; the job goes on where it stopped"
  # SLURM ends the job meanwhile. `sleep` would be a process of its own, and could outlive a shell that SLURM kills as it starts it.
  scontrol requeue "$SLURM_JOB_ID" && read -rt 300 <> <(:)
  exit 1
}

# Waits for a process, also where traps interrupt `wait`, and returns its exit code.
wait_for() {
  local code=127 got alive=yes
  while [ -n "$alive" ]; do
    kill -0 "$1" 2>/dev/null || alive=''
    wait "$1"
    got=$?
    [ $got = 127 ] || code=$got # 127: `wait` has returned it before
  done
  return "$code"
}

# Warns where the node has GPUs and the job was given none: the driver lists a node's GPUs to every job.
say_without_gpus() {
  local there
  there=$(find "${BENCH_DRIVER:-/proc/driver/nvidia}/gpus" -mindepth 1 -maxdepth 1 2>/dev/null | wc -l)
  if [ -z "${BENCH_GPUS:-}${SLURM_JOB_GPUS:-}${SLURM_GPUS_ON_NODE:-}" ] && [ "$there" -gt 0 ]; then
    say "this node has $there GPUs and the job asked for none: cells may run on the CPU; set gpus_per_node in the site file"
  fi
}

# run_matrix OPTIONS...: runs what is still missing of the run and returns the exit code of `bench run`, which gets the options. Does not
# return where SLURM has warned that the time limit is near: the job is then requeued.
run_matrix() {
  local options=(--matrix "$BENCH_MATRIX" --run "$BENCH_RUN" --results "$BENCH_RESULTS" --with-parent "${more_options[@]}" "$@") code tries=0
  local rendezvous=''
  warned='' ended='' agents=() coordinator=''
  say_without_gpus
  if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
    # shellcheck disable=SC2153 # SLURM sets it
    options+=(--share "$((SLURM_ARRAY_TASK_ID - SLURM_ARRAY_TASK_MIN))/$SLURM_ARRAY_TASK_COUNT")
  fi
  trap 'warned=yes; [ -z "$coordinator" ] || kill -TERM "$coordinator" 2>/dev/null' USR1
  trap 'ended=yes' TERM # SLURM sends TERM to the coordinator too; the job ends with this shell, which therefore waits for the coordinator
  if [ "$BENCH_NODES" -gt 1 ]; then
    rendezvous=$BENCH_WORK/rendezvous-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}
    options+=(--nodes "$BENCH_NODES" --rendezvous "$rendezvous")
    [ -z "${BENCH_INTERFACE:-}" ] || options+=(--interface "$BENCH_INTERFACE")
  fi
  while :; do
    [ -z "$rendezvous" ] || start_agents "$rendezvous"
    "${python[@]}" -m bench run "${options[@]}" &
    coordinator=$!
    wait_for "$coordinator"
    code=$?
    coordinator=''
    [ -z "$warned$ended" ] || break
    case $code in 0 | 1 | 2 | 130 | 143) break ;; esac
    tries=$((tries + 1))
    [ $tries -lt 5 ] || break
    say "the coordinator ended with exit code $code; it is started again and continues"
    [ $tries -gt 1 ] || options+=(--timeout 30) # seconds: most agents are connected already, and a lost node is not waited for again
  done
  [ -z "$rendezvous" ] || end_agents "$rendezvous"
  trap - USR1 TERM
  case $code in 130 | 143) [ -z "$warned" ] || requeue ;; esac
  return "$code"
}
