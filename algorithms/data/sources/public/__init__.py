"""Public data sets, and made-up ones, for trials and comparisons."""
