"""What a model computes with: attention, rotation, linear layers, and what replaces transformers' own."""
