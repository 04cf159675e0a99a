"""Edge agent, one daemon per device. Only task processes import torch or onnxruntime."""
