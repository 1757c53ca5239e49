"""Benchmarks: one module per question, each printing a table and writing JSON under results/."""
