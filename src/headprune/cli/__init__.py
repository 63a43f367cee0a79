"""The command line: a shell around one function per command."""
