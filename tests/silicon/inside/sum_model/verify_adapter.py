"""Marks this folder as a model folder; its check needs no adapter."""
