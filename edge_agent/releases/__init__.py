"""Releases on a device: models, versions of the agent, and settings."""
