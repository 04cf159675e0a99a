"""The edge agent: one daemon per board. Only `engines` and the worker's child import torch or onnxruntime."""
