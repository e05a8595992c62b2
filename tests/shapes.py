"""Checks the types and shapes of a call. An int is a float, as in PEP 484; nothing is drawn from Python's generator."""

from __future__ import annotations

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True, is_random=False))
