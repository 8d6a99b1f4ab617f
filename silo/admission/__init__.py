"""Which jobs a silo accepts: policy, budget and earlier sums."""
