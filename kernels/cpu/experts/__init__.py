"""Expert layers on a CPU: routing, sorting rows by expert, and each expert's matmul of its rows."""
