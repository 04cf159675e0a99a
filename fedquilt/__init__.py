"""fedquilt: federated learning on real edge boards."""

__version__ = "0.1.0"
