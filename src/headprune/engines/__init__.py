"""Engines that run exported models: each is a file, and a row of ``spec.ENGINES``."""
