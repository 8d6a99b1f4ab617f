"""A trained model as a folder: made when a job ends, verified when loaded, used on new records."""
