"""Training gates, on transformers.Trainer."""
