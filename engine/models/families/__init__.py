"""The model families, which convert checkpoints to transformers' modules that use the paged cache."""
