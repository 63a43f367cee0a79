"""Code that runs a cut model; ``modeling_headprune.py`` travels with every result that needs it."""
