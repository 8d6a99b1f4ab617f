"""Partitions of one data set among silos."""
