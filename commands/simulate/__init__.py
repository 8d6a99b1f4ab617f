"""`staddle simulate`, `reproduce`, `partition` and `membership`."""
