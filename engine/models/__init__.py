"""Loads a model by name: files, configuration, families, shares."""
