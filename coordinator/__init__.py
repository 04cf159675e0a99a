"""The coordinator: publishes rounds, folds updates, survives kill -9. No torch, no onnxruntime."""
