"""Plain-Python bookkeeping: requests, blocks, and who runs in the next step."""
