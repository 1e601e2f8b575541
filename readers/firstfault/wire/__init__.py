"""Encodes and decodes documents (protobuf) and verdicts (JSON).

Imports `model`, `text`, the generated code and `flyteidl`.
"""
