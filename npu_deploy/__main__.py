"""`python -m npu_deploy`: the same as `npu-deploy`, for places where scripts are not on PATH."""

from __future__ import annotations

from npu_deploy.cli import main

if __name__ == "__main__":
    main()
