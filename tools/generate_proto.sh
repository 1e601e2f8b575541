#!/usr/bin/env bash
# Makes proto/firstfault_proto/v1/*_pb2.py{,i} from the .proto file, in place or in the existing folder $1.
#
# The generator is old on purpose: code generated for protobuf 5.26 loads on every later runtime.
# flyteidl ships no .proto files, so protoc gets the descriptors of the installed package.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
out=$(cd "${1:-$root/proto}" && pwd)
venv=${FIRSTFAULT_CODEGEN_VENV:-$root/build/codegen-venv}
generator=(grpcio-tools==1.63.2 'setuptools<81' flyteidl==1.16.8)
if [ "$(cat "$venv/.made-with" 2>/dev/null)" != "${generator[*]}" ]; then
  "${PYTHON:-python3}" -m venv --clear "$venv"
  "$venv/bin/pip" install --quiet --no-input --disable-pip-version-check "${generator[@]}"
  echo "${generator[*]}" >"$venv/.made-with"
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$venv/bin/python" - "$work/flyteidl.bin" <<'PY'
import sys

from flyteidl.core import errors_pb2
from google.protobuf.descriptor_pb2 import FileDescriptorSet

descriptors = FileDescriptorSet()
seen = set()


def add(file):
    if file.name in seen:
        return
    seen.add(file.name)
    for dependency in file.dependencies:
        add(dependency)
    file.CopyToProto(descriptors.file.add())


add(errors_pb2.DESCRIPTOR)
with open(sys.argv[1], "wb") as stream:
    stream.write(descriptors.SerializeToString())
PY
cd "$root/proto"
"$venv/bin/python" -m grpc_tools.protoc --descriptor_set_in="$work/flyteidl.bin" -I . \
  --python_out="$out" --pyi_out="$out" firstfault_proto/v1/errors.proto
