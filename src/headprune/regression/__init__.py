"""Regression: a model held to limits and to its baseline."""
