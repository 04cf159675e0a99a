"""Updates of devices: validation, aggregation and recovery."""
