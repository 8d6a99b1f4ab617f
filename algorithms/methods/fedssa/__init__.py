"""FedSSA."""
