"""Board profiles: data, not code. One TOML file per board; every number names its source."""
