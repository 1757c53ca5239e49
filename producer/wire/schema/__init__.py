"""The stored and transmitted types: jobs, results, errors, key names."""
