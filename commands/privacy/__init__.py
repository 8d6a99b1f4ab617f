"""`staddle privacy`: plan noise and show budgets."""
