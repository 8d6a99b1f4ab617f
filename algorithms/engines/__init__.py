"""Engines that run the rounds of simulated silos: one by one, stacked with vmap, on CPU or GPU."""
