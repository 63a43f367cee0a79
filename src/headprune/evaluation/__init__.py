"""Quality, size and speed of a model, and of one model against another."""
