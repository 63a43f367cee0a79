"""The model: loaded or refused, its attention found, run, measured and described."""
