"""A silo's own files, one module per kind of file."""
