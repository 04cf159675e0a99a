"""Data of devices: reading, sharing out and preparing examples."""
