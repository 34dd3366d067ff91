"""mopd: multi-teacher on-policy distillation for LLM post-training."""

__version__ = "0.1.0"
