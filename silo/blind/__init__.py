"""A silo's part in blind rounds and in the key of a job."""
