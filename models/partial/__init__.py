"""Sub-networks by width, depth or mask, gated copies, and adapters."""
