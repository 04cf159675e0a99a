"""Task process of a device: its protocol, memory budget and control by the daemon."""
