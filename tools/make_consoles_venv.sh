#!/usr/bin/env bash
# Makes build/consoles-venv: DeepSpeed and Ray, whose launchers `make consoles` records, beside .venv's packages.
# They stay out of .venv, because they decide on versions of other packages. A launcher that cannot be installed is
# skipped; the file .made-with says for which packages the environment was made.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=build/consoles-venv
launchers=(deepspeed==0.19.8 ray==2.60.0)
stamp="${launchers[*]} for $PWD"
[ "$(cat "$venv/.made-with" 2>/dev/null)" = "$stamp" ] && exit 0
.venv/bin/python -m venv --clear "$venv"
site='import sysconfig; print(sysconfig.get_path("purelib"))'
# a path alone, so that firstfault.pth of .venv is not run: the recorded jobs know nothing of firstfault
.venv/bin/python -c "$site" >"$("$venv/bin/python" -c "$site")/outer.pth"
"$venv/bin/python" -m pip install --quiet --no-input --disable-pip-version-check "setuptools<81" wheel # for DeepSpeed
for launcher in "${launchers[@]}"; do
  DS_BUILD_OPS=0 DS_ACCELERATOR=cpu "$venv/bin/python" -m pip install --quiet --no-input --disable-pip-version-check \
    --no-build-isolation "$launcher" || echo "not installed: $launcher"
done
echo "$stamp" >"$venv/.made-with"
