"""The physical side of the KV cache: the block pool, tables, host tier."""
