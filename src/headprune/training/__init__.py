"""Training hard-concrete gates, on transformers.Trainer."""
