"""Deployments as a package."""
