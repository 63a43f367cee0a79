"""Recipes: a whole job as named steps, each done once for the same inputs."""
