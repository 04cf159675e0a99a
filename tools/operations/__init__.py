"""Operation of a fleet: dashboard, identities, runners and sites."""
