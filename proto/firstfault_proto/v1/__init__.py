"""Version 1: `errors_pb2` holds error documents, roster entries and sealed verdicts."""
