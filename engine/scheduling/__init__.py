"""Plain-Python bookkeeping: requests, blocks, and the work of the next step."""
