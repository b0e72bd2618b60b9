# shellcheck shell=bash
# This file is sourced by scripts that need torch's CUDA build. A local source of wheels may contain its CPU build, which pip would prefer: only
# the package index that pip is configured for remains.

# only_package_index PYTHON: exports settings of pip for its children; PYTHON has pip.
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
