"""What a deployment offers to the gates: runner, records, prompts, and where model folders are."""
