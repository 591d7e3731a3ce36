"""`python -m llms.deploy`: the same as `npu-deploy`, for places where scripts are not on PATH."""

from __future__ import annotations

from llms.cli import main

if __name__ == "__main__":
    main()
