"""`pagemill doctor`: what may cost jobs or keep them from running, checked one thing at a time."""
