"""Test tools for plug-in packages: conformance checks and toy networks."""
