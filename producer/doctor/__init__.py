"""`pagemill doctor`: checks for problems that may lose jobs or keep them from running."""
