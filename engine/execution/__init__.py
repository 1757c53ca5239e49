"""Execution on a device: inputs, attention, the forward pass, sampling."""
