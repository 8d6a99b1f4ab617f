"""Networks, their initial values, and pre-trained weights."""
