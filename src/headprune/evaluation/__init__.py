"""Evaluation: quality, size and speed of a model, and of one against another."""
