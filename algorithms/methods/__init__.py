"""The methods of the five papers, and the simple ones next to them."""
