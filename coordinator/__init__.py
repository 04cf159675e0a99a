"""Coordinator: publishes rounds, folds updates, survives kill -9. Needs no torch and no onnxruntime."""
