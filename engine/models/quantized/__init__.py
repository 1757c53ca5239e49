"""Quantized checkpoints: a file per published format, and how their weights reach the module."""
