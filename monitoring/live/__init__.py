"""The live page, and the same in a terminal: what a worker is doing now."""
