"""Local training of one silo in one round: the loop, DP-SGD, and its privacy account."""
