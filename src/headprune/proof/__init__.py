"""Proof that a result computes what its plan says."""
