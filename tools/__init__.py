"""Programs around the federation: simulated fleets, preparing jobs, benches, the demo."""
