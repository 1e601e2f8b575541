#!/usr/bin/env bash
# Makes build/nvrx-venv: a copy of .venv with NVIDIA's nvidia-resiliency-ext. It is kept out of .venv, because it brings
# a module that prints a warning whenever torch is imported. NVRX=0.7.0 chooses another release: that one needs Python
# 3.12 and the C library of Ubuntu 24.04.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
venv=$root/build/nvrx-venv
package=nvidia-resiliency-ext==${NVRX:-0.4.1}
stamp="$package, $(cat "$root/pyproject.toml" "$root/constraints.txt" | sha256sum)"
[ "$(cat "$venv/.made-with" 2>/dev/null)" = "$stamp" ] && exit 0
"$root/tools/copy_venv.sh" "$root/.venv" "$venv"
"$venv/bin/python" -m pip install --quiet --no-input --disable-pip-version-check "$package"
echo "$stamp" >"$venv/.made-with"
