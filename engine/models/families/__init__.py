"""The model families: turn each one's checkpoints into transformers' modules that use the paged cache."""
