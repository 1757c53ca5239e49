"""From logits to tokens: processors, filters, draws and log probabilities."""
