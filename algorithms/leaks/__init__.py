"""Checks that training data does not leak: models made to leak, values computed without noise."""
