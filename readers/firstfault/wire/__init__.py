"""Encodes and decodes documents (protobuf) and verdicts (JSON). Imports `model`, the generated code and `flyteidl`."""
