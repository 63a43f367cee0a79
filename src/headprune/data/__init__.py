"""Data: from files or hub ids to rows, batches and calibration samples."""
