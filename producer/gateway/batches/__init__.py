"""Files, and batches of requests from them."""
