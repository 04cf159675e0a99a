"""Remote upgrades of the agent: environments side by side, a launcher, and remote settings."""
