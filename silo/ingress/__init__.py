"""What arrives at a silo, checked before it is used."""
