"""``staddle model``: use a trained model."""
