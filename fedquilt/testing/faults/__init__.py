"""Simulated federations in one process on virtual time, with scheduled faults."""
