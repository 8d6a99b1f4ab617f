"""FedSimSup."""
