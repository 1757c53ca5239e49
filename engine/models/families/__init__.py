"""The model families: how each one's checkpoints become transformers' modules, attending through the paged cache."""
