"""What a board runs besides tasks, and how it is exchanged: models, the agent itself, its settings."""
