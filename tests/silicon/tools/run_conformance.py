"""What `make conformance` runs: build or find the sandbox, then the rows and the runtime on the real pyxrt.

Exit code: pytest's; 3 when this machine can have no sandbox. When the Debian archive has moved to another XRT
than the rows are of, that is said, and only the twin is judged, against the record of the expected release.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import xrt_sandbox

HERE = Path(__file__).resolve().parents[1]


def main(arguments: list[str]) -> int:
    """Run the suite; further arguments go to pytest."""
    begin = time.monotonic()
    try:
        sandbox = xrt_sandbox.prepare()
    except xrt_sandbox.SandboxError as error:
        print(f"conformance cannot run here: {error}", file=sys.stderr)
        return 3
    names = ["conformance_rows.py", "conformance_runtime.py"]
    if not sandbox.as_expected:
        print(
            f"NOT JUDGED ON THE REAL LIBRARY: the Debian archive has XRT {sandbox.xrt_version}, the rows are "
            f"of XRT {xrt_sandbox.EXPECTED_XRT}. The twin is judged against the record of that release only. "
            "Look at the differences, then record anew with NPU_RECORD=1 and raise EXPECTED_XRT."
        )
        names = ["test_conformance_recorded.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider"]
    code = subprocess.call([*command, *(str(HERE / name) for name in names), *arguments], cwd=HERE.parents[1])
    print(f"conformance: XRT {sandbox.xrt_version}, {time.monotonic() - begin:.0f} s including the sandbox")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
