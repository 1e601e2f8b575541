#!/usr/bin/env bash
# Fails if the checked-in protobuf code differs from what tools/generate_proto.sh makes from the .proto file.
set -euo pipefail
cd "$(dirname "$0")/.."
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
tools/generate_proto.sh "$fresh"
generated=0
while IFS= read -r -d '' file; do
  generated=$((generated + 1))
  if ! diff -u "proto/$file" "$fresh/$file"; then
    echo "proto/$file is not what its .proto file generates; run \`make proto\` and commit the result" >&2
    exit 1
  fi
done < <(cd "$fresh" && find . -type f -printf '%P\0')
checked_in=$(find proto -name '*_pb2.py' -o -name '*_pb2.pyi' | wc -l)
if [ "$generated" -eq 0 ] || [ "$generated" -ne "$checked_in" ]; then
  echo "$checked_in generated files are checked in, $generated were generated now" >&2
  exit 1
fi
