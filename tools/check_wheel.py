"""Check the files in a wheel: ``check_wheel.py WHEEL``. Prints each problem,
and exits with 1 if there is one.
"""

from __future__ import annotations

import sys
import zipfile

PACKAGES = (
    "firstfault/",
    "firstfault_inprocess/",
    "firstfault_logs/",
    "firstfault_proto/",
    "firstfault_torch/",
    "flytekitplugins/firstfault/",
    "flyteplugins/firstfault/",
)
REQUIRED = (
    *(f"{package}{name}" for package in PACKAGES for name in ("__init__.py", "py.typed")),
    "firstfault.pth",
    "firstfault_start.py",
    "firstfault_proto/v1/errors.proto",
    "firstfault_proto/v1/errors_pb2.py",
    "firstfault_proto/v1/errors_pb2.pyi",
    *(
        f"firstfault/render/page/{name}"
        for name in ("outcome.html.j2", "page.html.j2", "report.html.j2", "report.css", "report.js")
    ),
)
DIST_INFO_REQUIRED = ("METADATA", "entry_points.txt", "licenses/LICENSE")


def problems(names: list[str]) -> list[str]:
    """Return a sentence for each file that is missing in `names`, the files of a wheel,
    or does not belong there.
    """
    dist_info = next((name.split("/")[0] for name in names if ".dist-info/" in name), "")
    required = [*REQUIRED, *(f"{dist_info}/{name}" for name in DIST_INFO_REQUIRED)]
    found = [f"{name} is missing" for name in required if name not in names]
    for name in names:
        if name in REQUIRED:
            continue
        if not name.startswith((*PACKAGES, f"{dist_info}/")):
            found.append(f"{name} does not belong to any of the packages")
        elif "/tests/" in name or name.rsplit("/", 1)[-1].startswith(("test_", "conftest")):
            found.append(f"{name} is a test")
        elif name.endswith((".pyc", ".pth")):
            found.append(f"{name} should not be shipped")
    return found


def main() -> int:
    """Check the wheel named on the command line."""
    with zipfile.ZipFile(sys.argv[1]) as wheel:
        names = wheel.namelist()
    found = problems(names)
    for problem in found:
        print(f"{sys.argv[1]}: {problem}", file=sys.stderr)
    return 1 if found or not names else 0


if __name__ == "__main__":
    sys.exit(main())
