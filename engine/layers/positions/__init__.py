"""Positions in attention: rotary embeddings and ALiBi."""
