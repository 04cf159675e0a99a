"""Costs of training: time, memory and bytes."""
