"""The command line: a shell around ``headprune.pipelines``."""
