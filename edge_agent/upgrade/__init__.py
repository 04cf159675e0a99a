"""Upgrades of the agent over the air: environments side by side, the launcher that chooses one, settings from afar."""
