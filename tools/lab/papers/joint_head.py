"""Code of joint_head.toml: MobileNetV2 with restored batch normalisation as the starting network."""

from fedquilt.tools.lab.papers.fedstitch import restore_batchnorm

__all__ = ["restore_batchnorm"]  # named by joint_head.toml
