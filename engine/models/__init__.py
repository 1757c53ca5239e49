"""From a name to a loaded model: files, configuration, families, shares."""
