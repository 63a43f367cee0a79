"""llama.cpp: the names, keys and order that its files have, and the engine itself."""
