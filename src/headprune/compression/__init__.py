"""The whole job: candidates, judged on held-out text; the best is written."""
