"""Dataset runs: read a file of rows, and write the rows with the model's output, despite interruptions."""
