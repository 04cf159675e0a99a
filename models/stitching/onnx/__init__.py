"""Stitched networks as ONNX."""
