"""`python -m pytest_npu.device.preflight`: `npu-deploy doctor` where there is nothing but numpy."""

from __future__ import annotations

import argparse
import sys

from pytest_npu.device.preflight.doctor import command


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m pytest_npu.device.preflight", description=__doc__)
    parser.add_argument("model", nargs="?", help="also check memory and artefacts of a model")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--npu", action="store_true", help="exit with 4 unless the NPU is ready")
    args = parser.parse_args()
    text, code = command(args.model, as_json=args.json, npu=args.npu)
    print(text)
    return code


if __name__ == "__main__":
    sys.exit(main())
