"""Draws and cuts over a row of logits, compiled."""
