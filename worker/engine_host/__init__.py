"""The engine behind one small interface: on a thread of the worker, or in a separate process."""
