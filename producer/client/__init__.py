"""The producers for threads and for asyncio: two drivers of the same flows."""
