"""Inference and stitching with ONNX Runtime."""
