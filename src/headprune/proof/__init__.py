"""The proof: gated original, cut model and reloaded folder compute the same."""
