"""One function per command; no terminal."""
