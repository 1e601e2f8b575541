#!/usr/bin/env bash
# Makes build/frameworks-venv: .venv's packages, and the frameworks of lab/frameworks on top of them.
# The frameworks stay out of .venv: they would decide there which versions of fsspec and others are tested.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=build/frameworks-venv
frameworks=(lightning==2.6.1 hydra-core==1.3.2 accelerate==1.15.0 transformers==5.23.0 torchx==0.7.0)
stamp="${frameworks[*]} for $PWD"
[ "$(cat "$venv/.made-with" 2>/dev/null)" = "$stamp" ] && exit 0
.venv/bin/python -m venv --clear "$venv"
site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "import site; site.addsitedir('$site')" >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outer.pth"
"$venv/bin/python" -m pip install --quiet --no-input --disable-pip-version-check "${frameworks[@]}"
# commands of .venv name its own python
for command in pyflyte-execute pyflyte-fast-execute pytest torchrun; do
  sed "1s|.*|#!$PWD/$venv/bin/python|" ".venv/bin/$command" >"$venv/bin/$command"
  chmod +x "$venv/bin/$command"
done
echo "$stamp" >"$venv/.made-with"
