"""Encodes and decodes documents (protobuf) and verdicts (JSON).

Imports `model`, `text` and the generated code.
"""
