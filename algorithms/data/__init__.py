"""Data sets: where records come from, and the arrays that methods train on."""
