"""A silo's policy: what may leave, for which jobs."""
