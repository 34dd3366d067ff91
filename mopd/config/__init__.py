"""The configuration tree, how it is read and what is checked before anything is loaded."""

from mopd.config.checks import check_config, config_warnings, require_valid
from mopd.config.load import load_config, save_config
from mopd.config.schema import Config

__all__ = [
    "Config",
    "check_config",
    "config_warnings",
    "load_config",
    "require_valid",
    "save_config",
]
