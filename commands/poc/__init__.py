"""``staddle poc``: a federation on one machine that outlives its commands, for trying out."""
