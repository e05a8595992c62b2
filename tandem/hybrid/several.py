"""What several workers need, found out before any of them is started."""

from __future__ import annotations

from tandem.config.schema import Config
from tandem.errors import ModelError
from tandem.model.build import new_config
from tandem.model.file_names import FileNames
from tandem.model.hf import read_config
from tandem.model.skeleton import skeleton
from tandem.model.support import together
from tandem.model.tensor_parallel import tensor_parallel_problems
from tandem.model.tokenizer import load_tokenizer
from tandem.runtime.cluster import check_cluster
from tandem.trainer.fsdp import gathered_parts


def check_devices(config: Config) -> None:
    """Find out whether there is a device for each worker. `config` is resolved.

    Raises:
        ClusterError: Ray is missing, the address does not answer, there are too few devices.
    """
    cluster = config.cluster
    if cluster.num_workers > 1:
        check_cluster(cluster.num_workers, cluster.device, cluster.address)


def check_layouts(config: Config) -> None:
    """Find out whether the model can be cut as the config says, for training and for sampling. No weights are read.

    Raises:
        ModelError: All that speaks against it, with the values that fit.
    """
    if config.cluster.num_workers == 1:
        return
    model = config.model
    model_config = read_config(model) if model.new is None else new_config(model.new, load_tokenizer(model))
    whole = skeleton(model_config, trust_remote_code=model.trust_remote_code)
    # vLLM has plans of its own; `check_engine` asks for what they need.
    parts = 1 if config.rollout.engine == "vllm" else config.rollout.tensor_parallel
    problems = tensor_parallel_problems(whole, parts)
    for cut in (FileNames, gathered_parts):
        try:
            cut(whole)
        except ModelError as error:
            problems.append(error)
    if problems:
        raise together(problems)
