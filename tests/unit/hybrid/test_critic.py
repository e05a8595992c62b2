"""Workers with a critic: where it comes from, that it is nobody else's, where it is meanwhile, and that it is saved."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification

import tandem as td
from tandem.batch import CriticUpdate
from tandem.errors import CheckpointError, ModelError, PhaseError
from tandem.hybrid.critic_side import CriticSide
from tandem.hybrid.worker import Worker
from tandem.model.ranks import Ranks
from tests.ranks import RankProcesses
from tests.tiny import tiny_model_folder
from tests.unit.hybrid.made import contrast, rollout, start_tiny, trainer_logprobs, worker_of
from tests.unit.hybrid.on_ranks import start_on_ranks

PPO: Mapping[str, Mapping[str, Any]] = {
    "algorithm": {"advantage": "gae"},
    "critic": {"lr": 1e-2},
    "trainer": {"lr": 1e-2, "mini_batch_responses": 8, "mini_batch_shuffle": "responses", "update_epochs": 2},
}


def critic_of(workers: td.Workers) -> CriticSide:
    critic = worker_of(workers).training.critic
    assert critic is not None
    return critic


def returns_of(rollouts: td.Rollouts) -> Tensor:
    """Some that depend on the token before."""
    previous = rollouts.response_tokens.roll(1, dims=1) % 5
    return torch.where(rollouts.response_mask, previous.float(), 0.0)


def step(workers: td.Workers, number: int) -> tuple[Tensor, CriticUpdate]:
    """Sample, then update both; the values before, and what the critic's update reports."""
    rollouts = rollout(workers, step=number)
    with workers.train_phase() as trainer:
        values = trainer.values(rollouts)
        update = trainer.update_critic(rollouts, returns_of(rollouts), values)
        trainer.update(rollouts, contrast(rollouts))
    return values, update


def save(workers: td.Workers, folder: Path, *, copy: bool = True) -> None:
    folder.mkdir(exist_ok=True)
    workers._group.call(Worker.take_snapshot, copy=copy)
    workers._group.start(Worker.write_snapshot, folder).result()
    state = {"worker": workers._group.call(Worker.state), "counts": (workers.policy_version, workers._num_updates)}
    (folder / "state.json").write_text(json.dumps(state))


def load(workers: td.Workers, folder: Path) -> None:
    state = json.loads((folder / "state.json").read_text())
    workers._group.call(Worker.load_optimizer, folder, state["worker"])
    workers.policy_version, workers._num_updates = state["counts"]


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {
        f"{file.parent.relative_to(folder)}/{name}": tensor
        for file in sorted(folder.rglob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


def test_it_begins_as_the_policy_is_then_and_is_another_model_from_there_on(tmp_path: Path) -> None:
    with start_tiny(tmp_path / "model", config=PPO) as workers:
        with workers.train_phase() as trainer:
            trainer.supervised_update([[1, 2, 3]], [[4, 5, 6]], lr=1e-2)  # a warm start
        rollouts = rollout(workers)
        with workers.train_phase() as trainer:
            values = trainer.values(rollouts)
            assert not values.any()
            policy, critic = workers.model, critic_of(workers).critic.model
            for name, weight in policy.base_model.named_parameters():
                assert torch.equal(weight, critic.base_model.get_parameter(name)), name
            logprobs = trainer_logprobs(workers, rollouts)
            update = trainer.update_critic(rollouts, returns_of(rollouts), values)
            assert update.num_updates == 4
            assert torch.equal(trainer_logprobs(workers, rollouts), logprobs)
            changed = trainer.values(rollouts)
            assert changed.abs().max() > 0.01
            trainer.update(rollouts, contrast(rollouts))
            assert torch.equal(trainer.values(rollouts), changed)
            assert not torch.equal(trainer_logprobs(workers, rollouts), logprobs)


def test_critic_path_is_a_model_of_its_own(tmp_path: Path) -> None:
    """A reward model of another size."""
    folder = tiny_model_folder(tmp_path / "other", "LlamaForCausalLM", seed=3)
    reward_model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    with torch.no_grad():
        reward_model.get_parameter("score.weight").normal_(generator=torch.Generator().manual_seed(0))
    reward_model.save_pretrained(tmp_path / "reward_model")
    config = {**PPO, "critic": {"path": str(tmp_path / "reward_model")}}
    with start_tiny(tmp_path / "model", config=config) as workers:
        rollouts = rollout(workers)
        with workers.train_phase() as trainer:
            values = trainer.values(rollouts)
        sequence = torch.tensor([[*rollouts.prompt_of(0).tokens, *rollouts.response_tokens[0, :2].tolist()]])
        with torch.no_grad():
            expected = reward_model(sequence).logits.squeeze()
        torch.testing.assert_close(values[0, 2], expected, rtol=0, atol=5e-5)


def test_a_critic_that_cannot_be_is_refused_before_weights_are_loaded(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for path, message in ((tmp_path / "nowhere", "does not exist"), (empty, "has no config.json")):
        with pytest.raises(ModelError, match=rf"critic\.path: .*{message}"):
            start_tiny(tmp_path / "model", config={**PPO, "critic": {"path": str(path)}})


def test_without_a_critic_and_after_the_phase_the_calls_say_so(tmp_path: Path) -> None:
    with start_tiny(tmp_path / "model") as workers:
        rollouts = rollout(workers)
        with workers.train_phase() as trainer, pytest.raises(ValueError, match=r"algorithm\.advantage=gae"):
            trainer.values(rollouts)
        with pytest.raises(PhaseError):
            trainer.values(rollouts)


def test_returns_that_are_unknown_are_left_out_and_infinite_ones_refused(tmp_path: Path) -> None:
    with start_tiny(tmp_path / "model", config=PPO) as workers:
        rollouts = rollout(workers)
        returns = returns_of(rollouts)
        returns[0] = torch.nan
        with workers.train_phase() as trainer:
            update = trainer.update_critic(rollouts, returns, trainer.values(rollouts))
            assert (update.num_updates, update.num_skipped) == (4, 0)
            returns[1] = torch.inf
            with pytest.raises(ValueError, match="not finite"):
                trainer.update_critic(rollouts, returns, trainer.values(rollouts))
            with pytest.raises(ValueError, match=r"returns of shape \[16, 1\]"):
                trainer.update_critic(rollouts, returns[:, :1], trainer.values(rollouts))


def bytes_held(critic: CriticSide) -> int:
    tensors = [*critic.critic.model.parameters(), *critic.weights.parameters(), *critic.trained.moments()]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def around_a_rollout(ranks: Ranks, model: Path, config: Mapping[str, Any], folder: Path) -> tuple[int, Tensor]:
    """Bytes that it holds after a step; its values in the next one. In between it is saved."""
    with start_on_ranks(ranks, model, {**PPO, **config}) as workers:
        step(workers, 1)
        held = bytes_held(critic_of(workers))
        save(workers, folder)
        return held, step(workers, 2)[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offloaded_it_takes_no_memory_while_it_is_not_used_and_comes_back_as_it_was(
    ranks: RankProcesses, tmp_path: Path, dtype: str
) -> None:
    model = tiny_model_folder(tmp_path / "model")
    results = {}
    for kind in ("none", "disk"):
        config = {"trainer": {**PPO["trainer"], "offload": kind}, "model": {"path": str(model), "dtype": dtype}}
        [results[kind]] = ranks.run(around_a_rollout, 1, model, config, tmp_path / kind)
    (held, expected), (held_offloaded, values) = results["none"], results["disk"]
    assert held > 0
    assert held_offloaded == 0
    assert expected.any()
    assert torch.equal(values, expected)
    assert_equal(tensors_of(tmp_path / "disk"), tensors_of(tmp_path / "none"))


@pytest.mark.parametrize("copy", [True, False], ids=["in the background", "at once"])
def test_saved_and_loaded_it_goes_on_to_the_bit(tmp_path: Path, copy: bool) -> None:
    """Weights, moments and the order of mini-batches. With `copy`, what is saved is as it was before the next step."""
    with start_tiny(tmp_path / "model", config=PPO) as workers:
        step(workers, 1)
        save(workers, tmp_path / "saved", copy=copy)
        expected = step(workers, 2)
        save(workers, tmp_path / "expected")
    with start_tiny(tmp_path / "saved" / "model", config=PPO) as workers:
        load(workers, tmp_path / "saved")
        values, update = step(workers, 2)
        save(workers, tmp_path / "found")
    assert torch.equal(values, expected[0])
    assert update == expected[1]
    assert_equal(tensors_of(tmp_path / "found"), tensors_of(tmp_path / "expected"))


def test_a_critic_of_a_checkpoint_is_a_model_for_transformers_and_for_critic_path(tmp_path: Path) -> None:
    with start_tiny(tmp_path / "model", config=PPO) as workers:
        step(workers, 1)
        save(workers, tmp_path / "saved")
        expected, _ = step(workers, 2)
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved" / "critic" / "model")
    config = {**PPO, "critic": {"path": str(tmp_path / "saved" / "critic")}}
    with start_tiny(tmp_path / "saved" / "model", config=config) as workers:
        values, _ = step(workers, 2)
    assert torch.equal(values, expected)


def test_a_run_that_had_no_critic_begins_with_one_and_a_damaged_one_is_told(tmp_path: Path) -> None:
    with start_tiny(tmp_path / "model") as workers:
        rollout(workers)
        save(workers, tmp_path / "before")
    with start_tiny(tmp_path / "before" / "model", config=PPO) as workers:
        load(workers, tmp_path / "before")
        values, _ = step(workers, 1)
        assert not values.any()
        save(workers, tmp_path / "saved")
    critic = tmp_path / "saved" / "critic"
    for file in (critic / "optimizer" / "model.safetensors", critic / "model" / "model.safetensors"):
        whole = file.read_bytes()
        file.write_bytes(whole[:-4])
        _refused(tmp_path / "saved", str(file))
        file.write_bytes(whole)
    shutil.rmtree(critic)
    _refused(tmp_path / "saved", "does not exist")


def _refused(checkpoint: Path, reason: str) -> None:
    """The whole checkpoint is what to delete; no key of the config is to blame."""
    with start_tiny(checkpoint / "model", config=PPO) as workers, pytest.raises(CheckpointError) as caught:
        load(workers, checkpoint)
    assert str(caught.value).startswith(f"{checkpoint} cannot be loaded: ")
    assert reason in str(caught.value)
    assert "delete this checkpoint folder" in str(caught.value)
    assert "critic.path" not in str(caught.value)


def adapted(ranks: Ranks, model: Path, folder: Path) -> tuple[Tensor, Tensor]:
    """Values before the first and the second step, with adapters on the policy."""
    config = {**PPO, "model": {"path": str(model), "lora_rank": 2}, "critic": {"lr": 1e-3}}
    with start_on_ranks(ranks, model, config) as workers:
        first, _ = step(workers, 1)
        second, _ = step(workers, 2)
        save(workers, folder)
    return first, second


def test_beside_an_adapted_policy_all_weights_of_the_critic_are_trained(ranks: RankProcesses, tmp_path: Path) -> None:
    """On ranks as on one, to what rounding makes of two steps."""
    model = tiny_model_folder(tmp_path / "model")
    [(first, expected)] = ranks.run(adapted, 1, model, tmp_path / "one")
    assert not first.any()
    assert expected.any()
    for _, values in ranks.run(adapted, 2, model, tmp_path / "two"):
        torch.testing.assert_close(values, expected, rtol=0, atol=1e-3)
    base, critic = load_file(model / "model.safetensors"), load_file(tmp_path / "one/critic/model/model.safetensors")
    assert {*critic} == {*base, "score.weight"}
    for name, weight in base.items():
        assert 0 < (critic[name] - weight).abs().max() < 0.1, name


def two_steps(ranks: Ranks, model: Path, config: Mapping[str, Any], folder: Path) -> tuple[Tensor, CriticUpdate]:
    """With a small learning rate, so that rounding stays small."""
    sections = {**PPO, **config, "critic": {"lr": 1e-3}, "trainer": {**config.get("trainer", {}), "lr": 1e-3}}
    with start_on_ranks(ranks, model, sections) as workers:
        step(workers, 1)
        result = step(workers, 2)
        save(workers, folder)
    return result


def read_and_write(ranks: Ranks, folder: Path, copy: Path) -> None:
    with start_on_ranks(ranks, folder / "model", PPO) as workers:
        load(workers, folder)
        save(workers, copy)


def test_fault_40_on_ranks_it_is_that_of_one_and_fits_any_number_of_them(ranks: RankProcesses, tmp_path: Path) -> None:
    """The critic's weights to 1e-4 of their norm; a second step begins with the values of the first one's update."""
    model = tiny_model_folder(tmp_path / "model")
    [(expected, report)] = ranks.run(two_steps, 1, model, {}, tmp_path / "one")
    assert expected.any()
    for values, update in ranks.run(two_steps, 2, model, {"trainer": {"offload": "disk"}}, tmp_path / "two"):
        torch.testing.assert_close(values, expected, rtol=0, atol=1e-4)
        assert update.loss == pytest.approx(report.loss, rel=1e-4)
        assert update.explained_variance == pytest.approx(report.explained_variance, rel=1e-3, abs=1e-4)
    one, two = (tensors_of(tmp_path / name) for name in ("one", "two"))
    assert one.keys() == two.keys()
    weights = [name for name in one if name.startswith("critic/model/")]
    difference = sum(float((one[name] - two[name]).square().sum()) for name in weights) ** 0.5
    assert difference < 1e-4 * sum(float(one[name].square().sum()) for name in weights) ** 0.5
    for size in (1, 3):
        ranks.run(read_and_write, size, tmp_path / "two", tmp_path / f"on_{size}")
        assert_equal(tensors_of(tmp_path / f"on_{size}"), two)
