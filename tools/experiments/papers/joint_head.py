"""Code of joint_head.toml: fine-tuning starts from MobileNetV2 with its batch normalisation put back."""

from fedquilt.tools.experiments.papers.fedstitch_runs import unfolded

__all__ = ["unfolded"]  # named by joint_head.toml
