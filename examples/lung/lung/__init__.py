"""Survival of patients by scans of their lungs."""
