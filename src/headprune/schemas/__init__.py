"""Schemas: the files that headprune writes, each with its type and version."""
