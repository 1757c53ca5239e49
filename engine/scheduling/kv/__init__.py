"""The physical side of the KV cache: the block pool, tables, swap space."""
