"""From an edit to a folder that loads, proven, with its card; and the proof again later."""
