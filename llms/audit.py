"""`python -m llms.audit MODEL`, and the name that folders of earlier scaffolds import."""

from llms.verify.gates.phase7 import for_options
from llms.verify.gates.phase7.__main__ import main

__all__ = ["for_options"]

if __name__ == "__main__":
    raise SystemExit(main())
