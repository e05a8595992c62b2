"""Draws the learning curves that the README shows, from runs of the examples.

python -m benchmarks.curves docs/images/addition.png "seed 0"=runs/addition "seed 1"=runs/addition-1
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tandem.observe.curve import draw_curves


def main() -> None:
    """Read the arguments and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path, help="PNG or SVG to write")
    parser.add_argument("runs", nargs="+", metavar="LABEL=RUN", help="name in the legend, and run folder")
    args = parser.parse_args()
    args.picture.parent.mkdir(parents=True, exist_ok=True)
    draw_curves({label: Path(folder) for label, _, folder in (run.rpartition("=") for run in args.runs)}, args.picture)


if __name__ == "__main__":
    main()
