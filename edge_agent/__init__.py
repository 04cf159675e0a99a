"""Edge agent: one daemon per board. Only `engines` and the task's process import torch or onnxruntime."""
