"""Runs many silos on one machine: experiments, engines of several processes, results."""
