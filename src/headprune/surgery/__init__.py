"""Surgery: heads cut out, W_O refitted, KV heads merged."""
