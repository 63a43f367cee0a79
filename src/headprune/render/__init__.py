"""Results as blocks, which the terminal, Markdown (card, CI) and HTML (report) render."""
