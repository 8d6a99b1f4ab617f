"""Methods, exchanges, models, training: pure maths on tensors, no network."""
