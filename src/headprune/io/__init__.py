"""Files: read with bounds, written whole or not at all, replaced only where they are ours."""
