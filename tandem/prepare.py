"""Everything that can be known to be wrong before a model is loaded, and what a run starts from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tandem.algorithm.own_function import check_function
from tandem.algorithm.protocols import AdvantageFunction, Loss, LossFunction
from tandem.config.schema import Config
from tandem.data.examples import check_examples
from tandem.data.prompts import Prompts, check_data
from tandem.errors import RewardError, SeveralErrors, TandemError
from tandem.evaluate import HeldOut, load_held_out
from tandem.hybrid.critic_config import check_critic, check_critic_warmup
from tandem.hybrid.engine_checks import check_engine
from tandem.hybrid.reference import check_reference
from tandem.hybrid.several import check_devices, check_layouts
from tandem.hybrid.start import check_lengths, resolve_here
from tandem.hybrid.train_settings import check_loss
from tandem.model.facts import check_model
from tandem.model.tokenizer import load_tokenizer
from tandem.observe.console import Console
from tandem.observe.trackers import check_trackers
from tandem.rewards.pool import start_rewards


@dataclass(frozen=True)
class Plan:
    """What a run starts from."""

    config: Config  # resolved
    prompts: Prompts
    held_out: HeldOut
    num_steps: int


def prepare(
    config: Config,
    *,
    reward: Callable[..., object] | None = None,
    advantage: AdvantageFunction | None = None,
    loss: Loss | LossFunction | None = None,
) -> Plan:
    """Resolve the config, look at reward, model and data, and tokenise the prompts; no weights are read.

    Raises:
        TandemError: All that is wrong and does not depend on each other, at once.
    """
    console = Console()
    config = resolve_here(config)
    with console.task("looking at reward, model and data"):
        _check(config, reward, advantage, loss)
    with console.task("reading the prompts"):
        tokenizer = load_tokenizer(config.model)
        seed = config.run.seed
        prompts = Prompts.from_config(config.data, tokenizer, seed=seed)
        held_out = load_held_out(config.evaluation, config.data, tokenizer, seed=seed)
        _check_sources(config.reward.function, prompts, held_out)
        num_steps = config.run.steps or prompts.steps_for(config.data.epochs)
        check_critic_warmup(config, num_steps)
    return Plan(config, prompts, held_out, num_steps)


def _check(
    config: Config,
    reward: Callable[..., object] | None,
    advantage: AdvantageFunction | None,
    loss: Loss | LossFunction | None,
) -> None:
    one_worker = config.reward.model_copy(update={"workers": 1})
    checks: list[Callable[[], None]] = [
        lambda: start_rewards(one_worker, reward).close(),  # it loads the function, as all will later
        lambda: _check_model(config),
        lambda: check_devices(config),
        lambda: _check_advantage(advantage),
        lambda: check_loss(config, loss),
        lambda: check_reference(config),
        lambda: check_critic(config),
        lambda: check_trackers(config.tracking),
        lambda: check_data(config.data, _held_out_files(config), seed=config.run.seed),
        lambda: _check_examples(config),
    ]
    found = [error for check in checks if (error := _error_of(check)) is not None]
    errors = list({str(error): error for error in found}.values())  # of a model that several ask for: once
    if errors:
        raise errors[0] if len(errors) == 1 else SeveralErrors(errors)


def _check_advantage(advantage: AdvantageFunction | None) -> None:
    if advantage is not None:
        check_function("advantage", advantage, AdvantageFunction)


def _check_model(config: Config) -> None:
    check_lengths(config, check_model(config.model))
    check_layouts(config)
    check_engine(config)


def _error_of(check: Callable[[], None]) -> TandemError | None:
    try:
        check()
    except TandemError as error:
        return error
    return None


def _check_examples(config: Config) -> None:
    if config.sft.train is not None:
        check_examples(config.sft.train, config.data, seed=config.run.seed)


def _held_out_files(config: Config) -> list[str]:
    data = config.evaluation.data
    if data is None:
        return []
    return [data] if isinstance(data, str) else list(data.values())


def _check_sources(function: object, prompts: Prompts, held_out: HeldOut) -> None:
    """Where there is a reward function for each data source, there must be one for all that occur."""
    if not isinstance(function, Mapping):
        return
    sources = prompts.data_sources | {prompt.data_source for part in held_out.values() for prompt in part}
    missing = sorted(sources - function.keys())
    if missing:
        unused = sorted(function.keys() - sources)
        raise RewardError(
            f"reward.function has no function for data_source {', '.join(map(repr, missing))}"
            + (f", and one for {', '.join(map(repr, unused))}, which does not occur" if unused else ""),
            remedy=f"the data have {', '.join(map(repr, sorted(sources)))}; data.source_key names their column",
        )
