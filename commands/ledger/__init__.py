"""`staddle ledger`: show, verify, prove and reconcile ledgers."""
