"""Coordinator of federated learning jobs. Requires neither torch nor onnxruntime."""
