"""Event logs and snapshots in SQLite, retention and backup."""
