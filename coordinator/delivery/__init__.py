"""Delivery of tasks and blobs to devices, and of updates to the coordinator."""
