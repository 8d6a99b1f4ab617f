"""Reports on finished simulations: tables, curves, heatmaps."""
