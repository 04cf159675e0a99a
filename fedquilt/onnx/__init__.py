"""ONNX files, without the onnx package."""
