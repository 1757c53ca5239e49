"""Models from hubs: the files that a worker needs, their download, and the cache."""
