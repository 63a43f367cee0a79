"""The report: facts of all results side by side, as one page, Markdown or JSON."""
