"""The coordinator's disk: database, uploads, results."""
