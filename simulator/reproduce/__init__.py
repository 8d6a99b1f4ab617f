"""Experiments of the papers, and how close our results come."""
