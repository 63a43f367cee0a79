"""The whole job: candidates, judged on held-out text, of which the best is taken."""
