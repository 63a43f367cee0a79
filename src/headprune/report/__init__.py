"""The report: figures, and a page that shows runs; it reads files and plain view objects."""
