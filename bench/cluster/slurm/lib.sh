# shellcheck shell=bash
# Functions for all jobs. Reads BENCH_* variables, which `python -m bench submit` sets from the site file; each has a default.

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

# Prints the id of this job's run, which stays the same after a requeue and for all tasks of an array.
run_of_job() {
  local file id
  file=$BENCH_WORK/run-${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}
  id=$(date -u +%Y%m%dT%H%M%S)-$(printf %04x $((${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID} % 65536)))
  (set -o noclobber; echo "$id" >"$file") 2>/dev/null || true # the first task to get here chooses the id
  cat "$file"
}
BENCH_RUN=${BENCH_RUN:-$(run_of_job)}

# Keeps one node's agent running: restarts it if it, its job step or its node is lost. Stops when the run ends or the agent exits with 0 (the
# coordinator said that all is done) or 2 (it cannot work). Agents wait up to 30 minutes for the coordinator: a requeued job starts `bench run` only
# after the processes of its previous start have ended.
keep_agent() { # RENDEZVOUS NUMBER NAME
  local step='' code options=(--nodes=1 --ntasks=1 --nodelist="$3" --overlap --mpi=none --cpu-bind=none)
  options+=(--cpus-per-task="${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_ON_NODE:-1}}")
  trap '[ -z "$step" ] || kill "$step" 2>/dev/null; exit 1' TERM
  while [ ! -e "$1.over" ] && kill -0 $$ 2>/dev/null; do # $$ is the batch step's shell; not every SLURM kills its children
    srun "${options[@]}" "${more_srun[@]}" "${python[@]}" -m harness.agent "$1" --node "$2" --timeout 1800 \
      ${BENCH_INTERFACE:+--interface "$BENCH_INTERFACE"} &
    step=$!
    wait "$step"
    code=$?
    case $code in 0 | 2) return ;; esac
    sleep 1
  done
}

# Starts keep_agent for each node without one.
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

# Waits up to 5 seconds for the agents to exit, as most do by themselves, and kills the rest.
end_agents() { # RENDEZVOUS
  local agent tries=50
  touch "$1.over"
  for agent in "${agents[@]}"; do
    while kill -0 "$agent" 2>/dev/null && [ $tries -gt 0 ]; do
      sleep 0.1
      tries=$((tries - 1))
    done
    kill "$agent" 2>/dev/null
  done
  rm -f "$1" "$1.over"
}

# Requeues the job, which then continues where it stopped, up to BENCH_REQUEUES times.
requeue() {
  if [ "${SLURM_RESTART_COUNT:-0}" -ge "${BENCH_REQUEUES:-20}" ]; then
    say "requeued ${SLURM_RESTART_COUNT} times already: a trial may take longer than the job's time limit"
    exit 75
  fi
  say "the current trial is recorded as interrupted; the job will continue where it stopped"
  export requeued=yes # nightly.sbatch reads it
  # Waits for SLURM to end the job. `sleep` would be a separate process, and could outlive the shell if SLURM killed it at that moment.
  scontrol requeue "$SLURM_JOB_ID" && read -rt 300 <> <(:)
  export requeued=''
  exit 75
}

# Waits for a process, even if traps interrupt `wait`, and returns its exit code.
wait_for() {
  local code=127 got alive=yes
  while [ -n "$alive" ]; do
    kill -0 "$1" 2>/dev/null || alive=''
    wait "$1"
    got=$?
    [ $got = 127 ] || code=$got # 127: an earlier `wait` has returned it
  done
  return "$code"
}

# Warns if the node has GPUs but the job got none: the driver lists a node's GPUs to every job.
say_without_gpus() {
  local count
  count=$(find "${BENCH_DRIVER:-/proc/driver/nvidia}/gpus" -mindepth 1 -maxdepth 1 2>/dev/null | wc -l)
  if [ -z "${BENCH_GPUS:-}${SLURM_JOB_GPUS:-}${SLURM_GPUS_ON_NODE:-}" ] && [ "$count" -gt 0 ]; then
    say "this node has $count GPUs and the job asked for none: cells may run on the CPU; set gpus_per_node in the site file"
  fi
}

# run_matrix OPTIONS...: runs the run's remaining trials and returns the exit code of `bench run`, which gets the options. If SLURM warns that
# the time limit is near, requeues the job instead of returning.
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
    say "the coordinator ended with exit code $code; restarting it to continue"
    [ $tries -gt 1 ] || options+=(--timeout 30) # seconds: most agents are already connected, and a lost node has been waited for before
  done
  [ -z "$rendezvous" ] || end_agents "$rendezvous"
  trap - USR1 TERM
  case $code in 130 | 143) [ -z "$warned" ] || requeue ;; esac
  return "$code"
}
