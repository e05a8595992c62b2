"""The loop: sample, score, compare, update, and again with the new weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tandem.algorithm.advantages import estimate_advantages, estimate_returns
from tandem.algorithm.protocols import AdvantageFunction, Loss, LossFunction
from tandem.collect import collect
from tandem.config.schema import Config
from tandem.evaluate import evaluate
from tandem.hybrid.restart import outlive_workers
from tandem.hybrid.start import resolve_here, start_workers
from tandem.observe.run import Run
from tandem.observe.stop import Stop
from tandem.prepare import prepare
from tandem.rewards.pool import start_rewards
from tandem.sft import warm_start
from tandem.summary import show_end, show_start


def train(
    config: Config,
    *,
    reward: Callable[..., object] | None = None,
    advantage: AdvantageFunction | None = None,
    loss: Loss | LossFunction | None = None,
    stop: Stop | None = None,
) -> Path:
    """Train the policy that `config` describes; return the run's folder. (GRPO: arXiv:2402.03300, algorithm 1)

    A run folder that holds a checkpoint is gone on with. Where one of several workers dies, new ones take over from
    the last checkpoint.

    Args:
        config: From `load_config` or `config_from_dict`.
        reward: Scores a response, instead of `reward.function`.
        advantage: Computes advantages, instead of what `algorithm.advantage` names.
        loss: Computes the loss, instead of the clipped surrogate that `algorithm` describes. Of a plain function the
            token losses are summed up as `algorithm.loss_aggregation` says.
        stop: Set it from elsewhere to end the run after the step under way, with a checkpoint.

    Raises:
        TandemError: Whatever is wrong, with a remedy; as much as possible before the model is loaded.
    """
    config = resolve_here(config)
    return outlive_workers(config, lambda: _train(config, reward=reward, advantage=advantage, loss=loss, stop=stop))


def _train(
    config: Config,
    *,
    reward: Callable[..., object] | None,
    advantage: AdvantageFunction | None,
    loss: Loss | LossFunction | None,
    stop: Stop | None,
) -> Path:
    """The run, from its newest checkpoint to its end."""
    plan = prepare(config, reward=reward, advantage=advantage, loss=loss)
    config, prompts, seed = plan.config, plan.prompts, plan.config.run.seed
    with (
        Run(config, stop=stop) as run,
        start_workers(config, total_steps=plan.num_steps, loss=loss, watch=run) as workers,
        start_rewards(config.reward, reward) as reward_fn,
    ):
        done = workers.load_checkpoint({"prompts": prompts, "run": run}, allow_changes=config.run.allow_changes)
        run.keep_config()
        show_start(run, workers, plan, done, own_advantage=advantage is not None)
        if done == 0:
            warm_start(workers, config.sft, config.data, seed=seed, console=run.console)
            workers.keep_reference()
            if run.due("evaluation", 0):
                run.log_initial(evaluate(workers, reward_fn, plan.held_out, config.evaluation, step=0, seed=seed))
        for step in run.steps(plan.num_steps, resume_from=done):
            with workers.rollout_phase() as engine:
                # 1. Rollout: the policy answers each prompt with a group of responses.
                # 2. Reward: each response is scored as soon as it ends (DAPO draws again for groups without contrast).
                rollouts, rewards = collect(
                    engine, prompts, reward_fn, engine.options(step=step), config.algorithm, config.reward
                )
            with workers.train_phase() as trainer:
                # 3. Log-probs of each response token, under the old policy and the reference (PPO: values, too).
                old_logprobs = trainer.old_logprobs(rollouts)
                ref_logprobs = trainer.ref_logprobs(rollouts) if trainer.needs_reference else None
                values = trainer.values(rollouts) if trainer.has_critic else None
                # 4. Advantage: each response against the others of its group (PPO: each token against its value).
                scored = (rewards, rollouts, old_logprobs, ref_logprobs, values)
                advantages = estimate_advantages(config.algorithm, *scored, function=advantage)
                # 5. Update: ascend the clipped objective, mini-batch by mini-batch (PPO: after the critic's warm-up).
                update = critic = None
                if trainer.critic_is_warm:
                    update = trainer.update(rollouts, advantages, old_logprobs, ref_logprobs)
                if values is not None:
                    critic = trainer.update_critic(rollouts, estimate_returns(config.algorithm, *scored), values)
            evaluation = None
            if run.due("evaluation", step):
                evaluation = evaluate(workers, reward_fn, plan.held_out, config.evaluation, step=step, seed=seed)
            run.log(step, rollouts, rewards, advantages, update, evaluation, critic)
            if run.due("checkpoint", step):
                workers.save_checkpoint(step, {"prompts": prompts, "run": run}, evaluation)
        workers.close()
        show_end(run)
        return run.folder
