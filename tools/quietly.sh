#!/usr/bin/env bash
# quietly.sh LABEL COMMAND...
# Runs COMMAND and prints one line: LABEL and the seconds it took. Shows the output only if COMMAND fails.
set -uo pipefail
label=$1
shift
log=$(mktemp)
trap 'rm -f "$log"' EXIT
printf '%s ...' "$label"
start=$SECONDS
if "$@" >"$log" 2>&1; then
  printf ' %d s\n' "$((SECONDS - start))"
else
  status=$?
  printf ' failed\n'
  cat "$log" >&2
  exit "$status"
fi
