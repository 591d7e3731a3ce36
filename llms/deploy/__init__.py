"""Name that folders of earlier scaffolds import; the command is in `npu_deploy`."""
