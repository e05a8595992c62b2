"""What the chosen rollout engine needs, found out before anything is started."""

from __future__ import annotations

from tandem.config.schema import Config
from tandem.errors import ModelError
from tandem.model.build import new_config
from tandem.model.facts import check_model
from tandem.model.hf import DTYPES, read_config
from tandem.model.tokenizer import load_tokenizer
from tandem.rollout import vllm_checks

_GIB = 1 << 30


def check_engine(config: Config) -> None:
    """Find out whether vLLM is there and can take the model and its options, if it is to sample. `config` is resolved.

    Raises:
        ConfigError: vLLM is not installed, or does not know an option.
        ModelError: It lacks the architecture; heads cannot be divided; the KV cache is too small for a sequence.
    """
    if config.rollout.engine != "vllm":
        return
    vllm_checks.check_installed()
    on_cpu = config.cluster.device == "cpu"
    vllm_checks.check_options(config.rollout.vllm_options, on_cpu=on_cpu)
    assert config.model.dtype != "auto", "the config is not resolved"
    model, parts, cache = config.model, config.rollout.tensor_parallel, config.rollout.kv_cache_gib
    model_config = read_config(model) if model.new is None else new_config(model.new, load_tokenizer(model))
    facts = check_model(model)
    heads = model_config.num_attention_heads
    if heads % parts:
        raise ModelError(
            f"rollout.tensor_parallel is {parts}, which does not divide {facts.architecture}'s "
            f"num_attention_heads={heads}",
            remedy="set it to a number that does",
        )
    longest = config.data.max_prompt_length + config.rollout.max_response_length
    vllm_checks.check_model(
        model_config,
        facts.architecture,
        dtype=DTYPES[model.dtype],
        on_cpu=on_cpu,
        max_length=min(longest, facts.context.length or longest),
        cache_bytes=None if cache == "auto" else int(cache * _GIB),
        tensor_parallel=parts,
    )
