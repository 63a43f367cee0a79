"""Export: from a plan to a folder that loads, verified, with its card."""
