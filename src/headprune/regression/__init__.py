"""Limits that a model is held to, the baseline they refer to, and the verdicts."""
