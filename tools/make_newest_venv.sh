#!/usr/bin/env bash
# make_newest_venv.sh VENV [TORCH]
# Makes VENV: a copy of .venv with the newest torch on the index, or with this release, and the newest flytekit and
# kfpytorch. On Linux this torch may bring several gigabytes of CUDA packages.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
"$root/tools/copy_venv.sh" "$root/.venv" "$1"
# a user's own constraints, such as a cap on torch, would defeat the purpose
PIP_CONSTRAINT=/dev/null "$1/bin/python" -m pip --no-input --disable-pip-version-check install --no-compile --upgrade \
  "torch${2:+==$2}" flytekit flytekitplugins-kfpytorch
