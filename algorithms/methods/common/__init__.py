"""Building blocks that several methods and baselines share."""
