"""Distillation: a smaller model trained to match the one it came from."""
