"""Code of joint_head.toml: MobileNetV2 with restored batch normalisation as the starting network."""

from fedquilt.tools.lab.papers.fedstitch import unfolded

__all__ = ["unfolded"]  # named by joint_head.toml
