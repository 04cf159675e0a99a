"""Boards: meters, clocks and memory, real or simulated. One file per kind."""
