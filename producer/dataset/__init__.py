"""Dataset runs: a file of rows in, the same rows with the model's output out, whatever happens between."""
