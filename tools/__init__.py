"""Scripts that make what the repository ships; not part of the installed packages."""
