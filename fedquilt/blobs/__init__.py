"""Blobs: content-addressed files, stored in folders and transferred in verified chunks."""
