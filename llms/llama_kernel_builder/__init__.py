"""Kernel toolkit: specs, programs, toolchains, kernel cache, host runtime and block builders."""
