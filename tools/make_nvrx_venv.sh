#!/usr/bin/env bash
# Makes build/nvrx-venv: .venv's packages, and NVIDIA's nvidia-resiliency-ext on top of them, to compare with.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=build/nvrx-venv
package=nvidia-resiliency-ext==0.4.1
stamp="$package for $PWD"
[ "$(cat "$venv/.made-with" 2>/dev/null)" = "$stamp" ] && exit 0
.venv/bin/python -m venv --clear "$venv"
site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "import site; site.addsitedir('$site')" >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outer.pth"
"$venv/bin/python" -m pip install --quiet --no-input --disable-pip-version-check "$package"
echo "$stamp" >"$venv/.made-with"
