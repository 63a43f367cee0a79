"""Pickles: weights of unknown origin, read in a process without privileges."""
