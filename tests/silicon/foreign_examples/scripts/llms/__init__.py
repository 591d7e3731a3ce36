"""A package called llms that is not ours."""
