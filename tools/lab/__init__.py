"""Experiments of this project: benches, papers, audit and demo."""
