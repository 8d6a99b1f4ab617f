"""One run's folder: snapshots, history, results; and its progress."""
