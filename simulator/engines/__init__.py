"""The engine for a simulation, its worker processes and their shared memory."""
