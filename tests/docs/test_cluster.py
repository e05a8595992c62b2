"""The ways onto a cluster that docs/cluster.md shows: what can be told of them without one."""

from __future__ import annotations

import re
import shlex
import subprocess

import yaml

from tandem.config.schema import leaf_keys
from tests.docs.pages import ROOT, blocks

SLURM = ROOT / "examples" / "slurm.sh"


def test_the_slurm_script_is_bash() -> None:
    subprocess.run(["bash", "-n", str(SLURM)], check=True)


def test_options_of_the_slurm_script_exist() -> None:
    [command] = re.findall(r"^tandem train (.*) &$", SLURM.read_text(encoding="utf-8"), re.MULTILINE)
    assert {word.partition("=")[0] for word in shlex.split(command) if "=" in word} <= set(leaf_keys())


def test_the_job_of_kubernetes_runs_tandem_with_options_that_exist() -> None:
    [block] = blocks(ROOT / "docs" / "cluster.md", "yml")
    job = yaml.safe_load(block.text)
    program, command, config, *options = shlex.split(job["spec"]["entrypoint"])
    assert (program, command) == ("tandem", "train")
    values = dict(option.split("=") for option in options)
    assert set(values) <= set(leaf_keys())
    [workers] = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    [container] = workers["template"]["spec"]["containers"]
    gpus = workers["replicas"] * int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert int(values["cluster.num_workers"]) == gpus
    assert config.startswith("/shared/")
