"""The config: one frozen schema per section, read from YAML and the command line."""

from tandem.config.schema import Config, leaf_keys

__all__ = ["Config", "leaf_keys"]
