"""gRPC services: calls of silos and operators, with their limits."""
