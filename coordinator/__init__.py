"""The coordinator daemon: rounds, uploads, folds. It holds no data and needs no trust."""
