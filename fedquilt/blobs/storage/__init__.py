"""Blob store on a disk."""
