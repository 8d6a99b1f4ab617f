"""`staddle report`: what left a silo, as one HTML page."""
