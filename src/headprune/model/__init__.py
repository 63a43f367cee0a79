"""Live models: loading, locating attention, gating it, cutting it, counting what it costs."""
