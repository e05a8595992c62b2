"""The whole config: its sections, and its keys."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from tandem.config.algorithm import AlgorithmConfig
from tandem.config.checkpoint import CheckpointConfig
from tandem.config.cluster import ClusterConfig
from tandem.config.critic import CriticConfig
from tandem.config.data import DataConfig
from tandem.config.evaluation import EvaluationConfig
from tandem.config.model import ModelConfig
from tandem.config.reward import RewardConfig
from tandem.config.rollout import RolloutConfig
from tandem.config.run import RunConfig
from tandem.config.section import Section
from tandem.config.sft import SftConfig
from tandem.config.tracking import TrackingConfig
from tandem.config.trainer import TrainerConfig


class Config(Section):
    """Everything that describes a run. `load_config` also checks that the settings fit together."""

    run: RunConfig = Field(default_factory=RunConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    sft: SftConfig = Field(default_factory=SftConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    critic: CriticConfig = Field(default_factory=CriticConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    tracking: TrackingConfig = Field(default_factory=TrackingConfig)


SECTIONS: dict[str, type[Section]] = {
    "run": RunConfig,
    "model": ModelConfig,
    "data": DataConfig,
    "sft": SftConfig,
    "rollout": RolloutConfig,
    "reward": RewardConfig,
    "algorithm": AlgorithmConfig,
    "critic": CriticConfig,
    "trainer": TrainerConfig,
    "cluster": ClusterConfig,
    "checkpoint": CheckpointConfig,
    "evaluation": EvaluationConfig,
    "tracking": TrackingConfig,
}


def leaf_keys() -> tuple[str, ...]:
    """All keys with their section, such as `rollout.n`, in the order of the schema."""
    return tuple(f"{section}.{key}" for section, schema in SECTIONS.items() for key in schema.model_fields)


def value_of(config: Config, key: str) -> Any:
    """The value of a dotted key, in plain containers."""
    section, _, name = key.partition(".")
    return config.model_dump(include={section: {name}})[section][name]
