"""FedAIMS."""
