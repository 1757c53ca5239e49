"""A model's layers: attention, rotation, linear layers, and replacements of transformers' modules."""
