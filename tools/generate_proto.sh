#!/usr/bin/env bash
# Makes proto/firstfault_proto/v1/*_pb2.py{,i} from the .proto file, in place or in the existing folder $1.
#
# The generator is old on purpose: code generated for protobuf 4.25.1 loads on every later runtime.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
out=$(cd "${1:-$root/proto}" && pwd)
venv=${FIRSTFAULT_CODEGEN_VENV:-$root/build/codegen-venv}
generator=(grpcio-tools==1.62.3 'setuptools<81')
if [ "$(cat "$venv/.made-with" 2>/dev/null)" != "${generator[*]}" ]; then
  "${PYTHON:-python3}" -m venv --clear "$venv"
  "$venv/bin/pip" install --quiet --no-input --disable-pip-version-check "${generator[@]}"
  echo "${generator[*]}" >"$venv/.made-with"
fi
cd "$root/proto"
"$venv/bin/python" -m grpc_tools.protoc -I . \
  --python_out="$out" --pyi_out="$out" firstfault_proto/v1/errors.proto
