"""A deployment of another project, run in a process of its own."""
