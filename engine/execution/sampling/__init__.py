"""Turns logits into tokens: processors, filters, draws and log probabilities."""
