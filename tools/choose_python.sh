#!/usr/bin/env bash
# choose_python.sh
# Chooses the interpreter for .venv, and prints three lines: the interpreter, the extra that it can install (elastic, or
# torch without Flyte), and one sentence for the user if there is something to know, else an empty line.
# $PYTHON names an interpreter; otherwise it is python3, or another one if flytekit does not support python3's version.
# Installs nothing, except that uv, if there is one, may get Python 3.12.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
oldest=10
# The first minor version that flytekit refuses stands in pyproject.toml only.
refused=$(sed -n "s/.*flytekitplugins-kfpytorch; python_version < '3\.\([0-9]*\)'.*/\1/p" "$root/pyproject.toml")
range="3.$oldest to 3.$((refused - 1))"

# Prints an interpreter's minor version; fails if it does not run, as pyenv's shim of a version that is not selected.
minor_of() {
  "$1" -c 'import sys; print(sys.version_info[1])' 2>/dev/null
}

chosen() {
  printf '%s\n' "$@"
  exit 0
}

without_flyte="the environment gets no flytekit, and the demo and the tests leave out what needs Flyte"

given=${PYTHON:-}
python=${given:-python3}
minor=$(minor_of "$python" || echo 0)
if [ -n "$given" ] && [ "$minor" -lt "$oldest" ]; then
  echo "firstfault needs Python 3.$oldest or later, and PYTHON=$given is not; name another one, as in:" \
    "make test PYTHON=python3.$((refused - 1))" >&2
  exit 1
fi
if [ "$minor" -ge "$oldest" ] && [ "$minor" -lt "$refused" ]; then
  chosen "$python" elastic ""
fi
if [ -n "$given" ]; then
  chosen "$python" torch "flytekit does not support Python 3.$minor, only $range: $without_flyte"
fi

if [ "$minor" -eq 0 ]; then
  reason="python3 does not run"
elif [ "$minor" -lt "$oldest" ]; then
  reason="python3 is 3.$minor, and firstfault needs 3.$oldest or later"
else
  reason="python3 is 3.$minor, and flytekit supports only $range"
fi
for ((other = refused - 1; other >= oldest; other--)); do
  # Debian's python3.x may lack venv
  if [ "$(minor_of "python3.$other" || true)" = "$other" ] && "python3.$other" -c 'import ensurepip, venv' 2>/dev/null; then
    chosen "python3.$other" elastic "using python3.$other: $reason"
  fi
done
newest=3.$((refused - 1))
if command -v uv >/dev/null && uv python install "$newest" >&2 && found=$(uv python find --no-project "$newest"); then
  chosen "$found" elastic "using uv's Python $newest: $reason"
fi
if [ "$minor" -ge "$refused" ]; then
  chosen python3 torch "$reason, and none of these is installed: $without_flyte"
fi
echo "$reason; install one, or name it, as in: make test PYTHON=/path/to/python$newest" >&2
exit 1
