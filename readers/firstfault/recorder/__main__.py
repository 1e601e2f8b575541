"""The recorder's process: ``python -m firstfault.recorder <folder> <settings>``."""

import sys

if not getattr(sys.flags, "safe_path", False):
    # -m puts the working directory first, where a training's types.py or queue.py would shadow the
    # standard library's
    sys.path.append(sys.path.pop(0))

import json
from pathlib import Path

from firstfault.recorder.folder import NodeFolder
from firstfault.recorder.process import Settings
from firstfault.recorder.server import serve

if __name__ == "__main__":
    serve(NodeFolder(Path(sys.argv[1])), Settings(**json.loads(sys.argv[2])))
