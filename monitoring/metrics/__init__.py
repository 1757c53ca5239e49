"""The metrics as data, read from snapshots at scrape time."""
