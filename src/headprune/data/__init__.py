"""From files or hub ids to batches."""
