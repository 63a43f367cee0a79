"""Results as tables and pictures for a terminal."""
