"""Experiment files and the runs that they describe."""
