"""Test tools for packages that add to fedquilt: conformance of methods, toy networks, fake boards."""
