"""Clock control: a helper that runs as root, and the agent's client."""
