"""Getting models from hubs: which files a worker needs, their download, and what is cached."""
