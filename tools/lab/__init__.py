"""Experiments of this project: papers, audit, demo and new jobs."""
