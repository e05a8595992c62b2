"""Joins a Ray cluster and prints, as JSON, what it has or why it cannot be joined. A process, since Ray may hang."""

from __future__ import annotations

import json
import logging
import sys

import ray


def main(address: str) -> None:
    """Print the answer as the last line."""
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        found: dict[str, object] = {"resources": ray.cluster_resources()}
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        found = {"error": str(error)}
    sys.stdout.write(f"\n{json.dumps(found)}\n")


if __name__ == "__main__":
    main(sys.argv[1])
