"""Test tools for plug-in packages: conformance checks, toy networks, fake boards."""
