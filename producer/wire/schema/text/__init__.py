"""Properties of texts: chat messages, parsed answers, estimates of their tokens."""
