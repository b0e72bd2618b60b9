# shellcheck shell=bash
# Sourced by scripts that need torch's CUDA build. Leaves pip only its configured package index, because it would prefer a CPU build from a local
# source of wheels.

# only_package_index PYTHON: exports pip settings for child processes. PYTHON needs pip.
only_package_index() {
  local setting variable value
  for setting in index-url cert client-cert proxy trusted-host; do
    variable=PIP_$(tr a-z- A-Z_ <<<"$setting")
    value=${!variable:-$("$1" -m pip config get "global.$setting" 2>/dev/null || "$1" -m pip config get "install.$setting" 2>/dev/null || true)}
    [ -z "$value" ] || export "$variable=$value"
  done
  unset PIP_FIND_LINKS PIP_EXTRA_INDEX_URL PIP_NO_INDEX
  export PIP_CONFIG_FILE=/dev/null
}
