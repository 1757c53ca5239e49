"""Getting models from hubs: which files a start needs, their download, and what is cached."""
