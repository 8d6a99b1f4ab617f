"""Many silos of a job on one machine: experiments, engines of several processes, checkpoints and
results.
"""
