"""A small file of every format as a release wrote it; later releases must still read them."""
