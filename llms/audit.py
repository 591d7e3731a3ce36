"""`python -m llms.audit MODEL`, and the name that folders of earlier scaffolds import."""

from llms.verify.gates.phase7 import for_options

__all__ = ["for_options"]

if __name__ == "__main__":
    from npu_deploy.audit import main

    raise SystemExit(main())
