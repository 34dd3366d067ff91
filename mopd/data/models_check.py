"""Limits of checkpoints, for the lengths of prompts; `mopd.config.model_files` reads them."""

from mopd.config.model_files import ModelLimits, read_model_limits

__all__ = ["ModelLimits", "read_model_limits"]
