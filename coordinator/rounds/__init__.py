"""Decisions of rounds and rollouts: pure, without I/O and clock."""
