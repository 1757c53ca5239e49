"""Adapters for model families that do not go through the attention interface."""
