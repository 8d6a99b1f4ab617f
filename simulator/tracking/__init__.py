"""A run's measures for tracking tools, while it goes: TensorBoard, MLflow, Weights & Biases."""
