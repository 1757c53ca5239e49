"""What is stored and sent: jobs, results, errors, key names."""
