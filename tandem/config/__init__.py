"""The config: one frozen schema per section, read from YAML and the command line, all errors at once."""

from tandem.config.difference import Change, Difference, difference
from tandem.config.load import config_from_dict, load_config, to_yaml
from tandem.config.resolve import resolve_config
from tandem.config.schema import Config, leaf_keys

__all__ = [
    "Change",
    "Config",
    "Difference",
    "config_from_dict",
    "difference",
    "leaf_keys",
    "load_config",
    "resolve_config",
    "to_yaml",
]
