"""Differential privacy: accounting, noise and budgets."""
