#!/usr/bin/env bash
# make_side_venv.sh NAME PACKAGE...
# Makes build/NAME-venv: a copy of .venv with packages that would change the versions of other packages in .venv.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
venv=$root/build/$1-venv
shift
stamp="$*, $(cat "$root/pyproject.toml" "$root/constraints.txt" | sha256sum)"
[ "$(cat "$venv/.made-with" 2>/dev/null)" = "$stamp" ] && exit 0
"$root/tools/copy_venv.sh" "$root/.venv" "$venv"
"$venv/bin/python" -m pip install --quiet --no-input --disable-pip-version-check "$@"
echo "$stamp" >"$venv/.made-with"
