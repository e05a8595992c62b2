"""What can be done while the trainer has the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tandem.algorithm.advantages import idle_groups
from tandem.algorithm.losses import as_loss
from tandem.algorithm.protocols import Loss, LossFunction
from tandem.batch import CriticUpdate, Rollouts, UpdateResult
from tandem.config.model import ModelConfig
from tandem.errors import FunctionError
from tandem.hybrid.phases import PhaseHandle, Watch
from tandem.hybrid.train_settings import TrainSettings
from tandem.hybrid.worker import Worker
from tandem.runtime.worker_group import WorkerGroup
from tandem.trainer.critic import CriticBatch
from tandem.trainer.supervised import answers_as_rollouts
from tandem.trainer.update_batch import UpdateBatch


class TrainPhase(PhaseHandle):
    """Computes log-probs and updates the policy. Works inside of its `with` block only."""

    def __init__(
        self,
        group: WorkerGroup[Worker],
        settings: TrainSettings,
        reference: ModelConfig,
        *,
        policy_version: int,
        num_updates: int,
        num_critic_updates: int,
        watch: Watch,
    ) -> None:
        super().__init__("train")
        self._group = group
        self._settings = settings
        self._reference = reference
        self._timing = watch.timing
        self.policy_version = policy_version
        self.num_updates = num_updates
        self.num_critic_updates = num_critic_updates

    @property
    def has_critic(self) -> bool:
        """Whether there is one: with `algorithm.advantage=gae`."""
        return self._settings.has_critic

    @property
    def critic_is_warm(self) -> bool:
        """Whether the critic has learnt alone for `critic.warmup_steps`; true where there is none."""
        return self.num_critic_updates >= self._settings.critic_warmup

    @property
    def needs_reference(self) -> bool:
        """Whether loss or rewards have a term that needs `ref_logprobs`."""
        return self._settings.needs_reference

    def old_logprobs(self, rollouts: Rollouts) -> Float[Tensor, "B L"] | None:
        """Log-probs under the policy that the step begins with, as `algorithm.old_logprobs` says.

        Returns:
            None where the update takes its own, detached: with one update per step they are the same.
        """
        self.check_open()
        if self._settings.old_logprobs == "rollout":
            return _kept_logprobs(rollouts)
        if self._settings.old_logprobs == "update":
            return None
        with self._timing("logprobs"):
            return self._group.call(Worker.old_logprobs, rollouts)

    def ref_logprobs(self, rollouts: Rollouts) -> Float[Tensor, "B L"]:
        """Log-probs under the frozen reference, which is loaded the first time."""
        self.check_open()
        with self._timing("logprobs"):
            return self._group.call(Worker.ref_logprobs, rollouts, self._reference)

    def values(self, rollouts: Rollouts) -> Float[Tensor, "B L"]:
        """The critic's value of the state in which each token was chosen, in the reward's unit.

        The critic is loaded the first time; without `critic.path` it begins as a copy of the policy of that moment.

        Raises:
            PhaseError: The phase has ended.
            ValueError: There is no critic.
        """
        self._check_critic()
        with self._timing("values"):
            return self._group.call(Worker.values, rollouts)

    def update_critic(
        self, rollouts: Rollouts, returns: Float[Tensor, "B L"], values: Float[Tensor, "B L"]
    ) -> CriticUpdate:
        """Bring the critic's values closer to the returns.

        Args:
            rollouts: The responses.
            returns: What the values shall be. NaN = unknown: such tokens are left out, of denominators too.
            values: The critic's before the update, from `values`.

        Raises:
            PhaseError: The phase has ended.
            TrainingError: Too many updates in a row were not finite.
            ValueError: There is no critic; shapes do not fit; a return or value is infinite.
        """
        self._check_critic()
        _check_shapes(rollouts, returns=returns, values=values)
        mask = rollouts.loss_mask(mask_truncated=self._settings.mask_truncated)
        mask = mask & ~returns.isnan()
        if not bool((returns.isfinite() & values.isfinite())[mask].all()):
            raise ValueError("some returns or values are not finite")
        self.num_critic_updates += 1
        with self._timing("update_critic"):
            return self._group.call(Worker.update_critic, CriticBatch(rollouts, returns, values, mask))

    def _check_critic(self) -> None:
        self.check_open()
        if not self.has_critic:
            raise ValueError("there is no critic: set algorithm.advantage=gae")

    def update(
        self,
        rollouts: Rollouts,
        advantages: Float[Tensor, " B"] | Float[Tensor, "B L"],
        old_logprobs: Float[Tensor, "B L"] | None = None,
        ref_logprobs: Float[Tensor, "B L"] | None = None,
        *,
        sampling_logprobs: Float[Tensor, "B L"] | None = None,
        loss: Loss | LossFunction | None = None,
    ) -> UpdateResult:
        """Ascend the objective on one step's rollouts.

        Args:
            rollouts: The responses. Those of the same `policy_version` count as written by this policy: give rollouts
                of other workers, or made by hand, another one (-1), or hand in `old_logprobs`.
            advantages: Of each response, or of each token.
            old_logprobs: Under the policy that wrote the rollouts. None = as `algorithm.old_logprobs` says; those kept
                while sampling where the policy has changed since.
            ref_logprobs: Under the reference; where given, its KL is reported.
            sampling_logprobs: For rollouts that are older than the policy: the trainer's log-probs of them from when
                it had the weights that wrote them. With these, engine mismatch and staleness are told apart.
            loss: In place of the config's: `ClippedSurrogate(...)`, or a `LossFunction`, aggregated as the config says.

        Raises:
            PhaseError: The phase has ended.
            TrainingError: Too many updates in a row were not finite.
            ValueError: Shapes do not fit, an advantage is not finite, or the old log-probs are of a cut distribution.
        """
        self.check_open()
        per_token = _per_token(advantages)
        _check_shapes(
            rollouts,
            advantages=per_token,
            old_logprobs=old_logprobs,
            ref_logprobs=ref_logprobs,
            sampling_logprobs=sampling_logprobs,
        )
        batch = UpdateBatch(
            rollouts=rollouts,
            advantages=per_token,
            loss_mask=self._loss_mask(rollouts, per_token),
            old_logprobs=self._old_logprobs_for(rollouts, old_logprobs),
            ref_logprobs=ref_logprobs,
            correction=self._settings.correction,
            sampling_logprobs=sampling_logprobs,
        )
        self.num_updates += 1
        self.policy_version += 1  # from now on the weights may differ, also where the update is broken off
        with self._timing("update"):
            result = self._group.call(
                Worker.update,
                batch,
                self._settings.loss if loss is None else as_loss(loss, self._settings.loss),
                lr=self._settings.schedule.at(self.num_updates),
                step=self.num_updates,
                policy_version=self.policy_version,
            )
        self.policy_version = result.policy_version
        return result

    def _loss_mask(self, rollouts: Rollouts, advantages: Float[Tensor, "B _"]) -> Bool[Tensor, "B L"]:
        """Tokens in the loss, whose advantages must be finite."""
        mask = rollouts.loss_mask(mask_truncated=self._settings.mask_truncated)
        inside = torch.where(mask, advantages, 0.0)
        if not bool(inside.isfinite().all()):
            raise ValueError("some advantages are not finite")
        if self._settings.drop_idle_groups:
            mask = mask & ~idle_groups(inside, rollouts.group_ids)[:, None]
        return mask

    def _old_logprobs_for(self, rollouts: Rollouts, given: Tensor | None) -> Float[Tensor, "B L"] | None:
        """Never let the update take its own log-probs for the old ones where they are not the same."""
        if given is not None:
            return given
        if rollouts.policy_version != self.policy_version:
            return _kept_logprobs(rollouts)
        return self.old_logprobs(rollouts)

    def supervised_update(
        self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], *, lr: float
    ) -> float:
        """One step of maximum likelihood on given answers (token ids, ending with EOS); returns the loss per token.

        Raises:
            PhaseError: The phase has ended.
            TrainingError: Too many updates in a row were not finite.
            ValueError: Not one answer for each prompt, or one without a token.
        """
        self.check_open()
        rollouts = answers_as_rollouts(prompts, answers)
        self.policy_version += 1
        return self._group.call(Worker.supervised_update, rollouts, lr)


def _check_shapes(rollouts: Rollouts, **matrices: Tensor | None) -> None:
    """Raise ValueError for what is neither [B, L] nor, as advantages may be, [B, 1]."""
    rows, width = rollouts.response_tokens.shape
    for name, matrix in matrices.items():
        widths = (1, width) if name == "advantages" else (width,)
        if matrix is not None and (matrix.ndim != 2 or len(matrix) != rows or matrix.shape[1] not in widths):
            raise ValueError(
                f"{name} of shape {list(matrix.shape)} do not fit {rows} responses of up to {width} tokens"
            )


def _kept_logprobs(rollouts: Rollouts) -> Float[Tensor, "B L"]:
    """Those of the engine; the trainer's of the full distribution are no match for those of a cut one."""
    if rollouts.cut_logprobs:
        raise ValueError(
            "the log-probs that vLLM has kept under top_p or top_k are of a cut distribution: hand in old_logprobs, "
            "from trainer.old_logprobs(rollouts) before the policy changes, with algorithm.old_logprobs=recompute"
        )
    return rollouts.rollout_logprobs


def _per_token(advantages: object) -> Float[Tensor, "B _"]:
    """As float32 on the CPU; those of responses as one column."""
    if not isinstance(advantages, Tensor):
        raise FunctionError(
            f"advantages must be a tensor, they are a {type(advantages).__name__}",
            remedy="torch.as_tensor(advantages) makes one of numbers and of numpy arrays",
        )
    advantages = advantages.detach().to("cpu", torch.float32)
    return advantages[:, None] if advantages.ndim == 1 else advantages
