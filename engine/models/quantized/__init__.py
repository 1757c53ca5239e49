"""Quantized checkpoints: a file per published format, and the transfer of weights to the module."""
