"""Every call of a script, as a function that returns a `Call`."""
