"""File formats: TOML, bundles, labels and personal models."""
