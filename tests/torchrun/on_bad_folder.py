"""Runs a command on a folder that is broken, in a mount namespace of its own:
``on_bad_folder.py KIND FOLDER COMMAND``.

KIND is read-only, full, small, no-temporary: no folder for temporary files can be written, and
FOLDER is seen as /mnt; or dead: it answers nothing. Start it with ``unshare --user --map-root-user
--mount``. Exit code 77: this machine forbids such mounts. Where only root may use /dev/fuse,
dead_folder/sitecustomize.py replaces the dead mount.
"""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

_FORBIDDEN = 77
_BIND = 4096
_libc = ctypes.CDLL(None, use_errno=True)


def mount(kind: str, folder: str, flags: int, data: str) -> None:
    if _libc.mount(b"none", folder.encode(), kind.encode(), flags, data.encode()):
        print(os.strerror(ctypes.get_errno()), file=sys.stderr)
        sys.exit(_FORBIDDEN)


def break_folder(kind: str, folder: str) -> None:
    """Make the folder refuse writes, or answer nothing."""
    if kind == "dead" and not os.access("/dev/fuse", os.R_OK | os.W_OK):
        os.environ |= {
            "DEAD_FOLDER": folder,
            "PYTHONPATH": str(Path(__file__).parent / "dead_folder"),
        }
    elif kind == "dead":  # a file system in user space that no program serves
        channel = os.open("/dev/fuse", os.O_RDWR)
        mount("fuse", folder, 0, f"fd={channel},rootmode=40000,user_id=0,group_id=0")
    elif kind == "no-temporary":
        if _libc.mount(folder.encode(), b"/mnt", b"", _BIND, b""):
            sys.exit(_FORBIDDEN)
        for usual in filter(os.path.isdir, ("/usr/tmp", "/var/tmp", "/tmp")):  # noqa: S108
            mount("tmpfs", usual, 1, "")
        os.chdir("/tmp")  # noqa: S108 - the working folder is tried last
    elif kind == "read-only":
        mount("tmpfs", folder, 1, "")
    else:
        mount("tmpfs", folder, 0, "size=256k")
        Path(folder, "ballast").write_bytes(bytes(2**18 if kind == "full" else 1))


if __name__ == "__main__":
    _, kind, folder, *command = sys.argv
    break_folder(kind, folder)
    sys.exit(subprocess.run(command, check=False).returncode)
