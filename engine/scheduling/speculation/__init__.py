"""Prediction of draft tokens, and their cost."""
