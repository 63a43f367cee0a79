"""Training: the loop that gates and distillation share, with checkpoints to resume from."""
