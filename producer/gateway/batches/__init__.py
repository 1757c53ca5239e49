"""Files, and batches of the requests in them."""
