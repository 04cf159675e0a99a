"""Data of devices: reading, partitioning and preparing examples."""
