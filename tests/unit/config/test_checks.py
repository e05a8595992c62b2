from __future__ import annotations

import pytest

from tandem.config import load_config
from tandem.config.checks import updates_per_step
from tandem.config.option import choices
from tandem.errors import ConfigError

ENOUGH = ("model.path=Qwen/Qwen3-0.6B", "data.train=train.parquet", "reward.function=exact_match")
WITHIN_GROUPS = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline")
WITHOUT_GROUPS = ("reinforce_plus_plus", "remax", "gae")
NEW = "model.new={architecture: Qwen3ForCausalLM}"


def messages(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*ENOUGH, *overrides])
    return [f"{problem.key}: {problem.message} -> {problem.remedy}" for problem in caught.value.problems]


@pytest.mark.parametrize("advantage", WITHIN_GROUPS)
def test_fault_45_a_group_of_one_has_nothing_to_compare_with(advantage: str):
    assert messages("rollout.n=1", f"algorithm.advantage={advantage}") == [
        f"rollout.n: is 1: a group of one has nothing to compare with, so with algorithm.advantage={advantage} it "
        "would teach nothing -> set it to 2 or more; 8 is usual. reinforce_plus_plus, remax and gae need no group "
        "(algorithm.advantage)"
    ]


@pytest.mark.parametrize("advantage", WITHOUT_GROUPS)
@pytest.mark.parametrize("idle_groups", ["drop", "resample"])
def test_what_compares_with_something_else_needs_no_group_and_puts_none_aside(advantage: str, idle_groups: str):
    load_config(None, [*ENOUGH, "rollout.n=1", f"algorithm.advantage={advantage}"])
    assert messages(f"algorithm.idle_groups={idle_groups}", f"algorithm.advantage={advantage}") == [
        f"algorithm.idle_groups: is {idle_groups}, but with algorithm.advantage={advantage} groups of equal rewards "
        "teach something, too -> set algorithm.idle_groups=keep, or algorithm.advantage to one of grpo, dr_grpo, rloo, "
        "reinforce_plus_plus_baseline"
    ]


@pytest.mark.parametrize("idle_groups", ["drop", "resample"])
@pytest.mark.parametrize(
    "penalty", [["algorithm.kl_coef=0.1", "algorithm.kl_place=reward"], ["algorithm.preset=rloo"]], ids=str
)
def test_equal_rewards_teach_something_where_each_has_its_own_penalty(idle_groups: str, penalty: list[str]):
    (message,) = messages(f"algorithm.idle_groups={idle_groups}", *penalty)
    assert message == (
        f"algorithm.idle_groups: is {idle_groups}, but with algorithm.kl_place=reward groups of equal rewards teach "
        "something, too: each response has its own KL penalty -> set algorithm.idle_groups=keep, or "
        "algorithm.kl_place=loss"
    )
    for cure in ("algorithm.idle_groups=keep", "algorithm.kl_place=loss"):
        load_config(None, [*ENOUGH, f"algorithm.idle_groups={idle_groups}", *penalty, cure])


def test_the_first_batch_counts_among_those_drawn():
    assert messages("algorithm.idle_groups=resample", "algorithm.max_resample=1") == [
        "algorithm.max_resample: is 1, the batch that each step begins with: algorithm.idle_groups=resample would draw "
        "nothing in its place -> set it to 2 or more, or algorithm.idle_groups=keep"
    ]
    load_config(None, [*ENOUGH, "algorithm.idle_groups=resample", "algorithm.max_resample=2"])


def test_every_advantage_is_known_to_need_a_group_or_not():
    assert {*WITHIN_GROUPS, *WITHOUT_GROUPS} == set(choices("algorithm.advantage"))


def test_a_kl_penalty_in_the_rewards_needs_old_log_probs_before_the_update():
    overrides = ["algorithm.kl_coef=0.1", "algorithm.kl_place=reward"]
    (message,) = messages(*overrides, "algorithm.old_logprobs=update")
    assert message == (
        "algorithm.old_logprobs: is update, but with algorithm.kl_place=reward they are needed before the update, for "
        "the advantages -> set algorithm.old_logprobs=auto or recompute, or algorithm.kl_place=loss"
    )
    for choice in ("auto", "rollout", "recompute"):
        load_config(None, [*ENOUGH, *overrides, f"algorithm.old_logprobs={choice}"])


@pytest.mark.parametrize("buffer", [100, 200])
def test_some_length_is_free_of_the_penalty(buffer: int):
    assert messages("rollout.max_response_length=100", f"reward.overlong_buffer={buffer}") == [
        f"reward.overlong_buffer: is {buffer}, so with rollout.max_response_length=100 every response would be too "
        "long -> set it below 100; DAPO takes a fifth of the length, 20"
    ]
    load_config(None, [*ENOUGH, "rollout.max_response_length=100", "reward.overlong_buffer=99"])
    assert messages("rollout.max_response_length=4", "reward.overlong_buffer=4") == [
        "reward.overlong_buffer: is 4, so with rollout.max_response_length=4 every response would be too long -> set "
        "it below 4 (0 = off)"
    ]


def test_the_policy_learns_after_the_critics_warm_up():
    overrides = ["algorithm.advantage=gae", "run.steps=10"]
    assert messages(*overrides, "critic.warmup_steps=10") == [
        "critic.warmup_steps: is 10, so within run.steps=10 the policy would never be updated "
        "-> set it below 10, or more steps"
    ]
    load_config(None, [*ENOUGH, *overrides, "critic.warmup_steps=9"])


@pytest.mark.parametrize(
    ("mini_batch", "message"),
    [
        (64, "is 64, more than a step's 32 responses (4 prompts x 8) -> set it to 32 at most, or null for all"),
        (12, "is 12, which does not divide a step's 32 responses (4 prompts x 8) -> the nearest that do are 8 and 16"),
        (31, "is 31, which does not divide a step's 32 responses (4 prompts x 8) -> the nearest that do are 16 and 32"),
    ],
)
def test_fault_45_mini_batches_must_divide_the_step_and_the_valid_sizes_are_named(mini_batch: int, message: str):
    overrides = ("data.prompts_per_step=4", f"trainer.mini_batch_responses={mini_batch}")
    assert messages(*overrides) == [f"trainer.mini_batch_responses: {message}"]


def test_mini_batches_that_divide_the_step_are_fine():
    config = load_config(None, [*ENOUGH, "data.prompts_per_step=4", "trainer.mini_batch_responses=16"])
    assert updates_per_step(config) == 2


@pytest.mark.parametrize("key", ["rollout.tensor_parallel", "trainer.replicas"])
@pytest.mark.parametrize(
    ("workers", "count", "message"),
    [
        (2, 3, "is 3, which does not divide cluster.num_workers=2 -> set it to 1 or 2, or cluster.num_workers to"),
        (
            6,
            4,
            "is 4, which does not divide cluster.num_workers=6 -> set it to 1, 2, 3 or 6, or cluster.num_workers to",
        ),
    ],
)
def test_fault_45_workers_are_divided_evenly_and_the_valid_numbers_are_named(
    key: str, workers: int, count: int, message: str
):
    found = messages(f"cluster.num_workers={workers}", f"{key}={count}")
    assert found == [f"{key}: {message} a multiple of {count}"]
    load_config(None, [*ENOUGH, f"cluster.num_workers={workers}", f"{key}={workers}"])


def test_both_layouts_are_checked_at_once():
    found = messages("cluster.num_workers=4", "rollout.tensor_parallel=3", "trainer.replicas=8")
    assert [message.partition(":")[0] for message in found] == ["rollout.tensor_parallel", "trainer.replicas"]


@pytest.mark.parametrize(
    ("overrides", "start"),
    [
        (
            ["trainer.update_epochs=2"],
            "algorithm.old_logprobs: is update, which needs one update per step, but a step has 2",
        ),
        (["trainer.mini_batch_responses=64"], "algorithm.old_logprobs: is update, which needs one update per step"),
        (["rollout.top_p=0.9"], "algorithm.old_logprobs: is update, but with rollout.top_p=0.9"),
    ],
)
def test_old_logprobs_of_the_update_need_one_update_of_unfiltered_samples(overrides: list[str], start: str):
    (message,) = messages("algorithm.old_logprobs=update", *overrides)
    assert message.startswith(start)


@pytest.mark.parametrize(
    ("setting", "off"),
    [
        ("algorithm.correction=token_tis", "algorithm.correction=none"),
        ("algorithm.mismatch_stop=0.1", "algorithm.mismatch_stop=null"),
    ],
)
def test_fault_22_nothing_is_compared_with_log_probs_of_a_cut_distribution(setting: str, off: str):
    """vLLM's are such; those of the embedded engine are of the full one, whatever is drawn from."""
    key, _, value = setting.partition("=")
    (message,) = messages(setting, "rollout.engine=vllm", "rollout.top_p=0.9", "rollout.top_k=20")
    assert message == (
        f"{key}: is {value}, but with rollout.top_p and rollout.top_k vLLM's log-probs are of a cut distribution -> "
        f"set {off}, or rollout.engine=embedded, or leave out rollout.top_p and rollout.top_k"
    )
    for cure in ((off,), ("rollout.engine=embedded",), ("rollout.top_p=1.0", "rollout.top_k=null")):
        load_config(None, [*ENOUGH, setting, "rollout.engine=vllm", "rollout.top_k=20", *cure])


@pytest.mark.parametrize("key", ["rollout.temperature", "evaluation.temperature"])
def test_temperatures_that_vllm_would_raise_are_refused(key: str):
    """It samples at 0.01 where it is told less, but 0 is greedy."""
    (message,) = messages("evaluation.data=x", "rollout.engine=vllm", f"{key}=0.005")
    assert message == (
        f"{key}: is 0.005, but vLLM samples at 0.01 or above -> set {key}=0.01 or more, or rollout.engine=embedded"
    )
    enough = (*ENOUGH, "evaluation.data=x")
    load_config(None, [*enough, "rollout.engine=vllm", f"{key}=0.01"])
    load_config(None, [*enough, "rollout.engine=embedded", f"{key}=0.005"])
    load_config(None, [*enough, "rollout.engine=vllm", "evaluation.temperature=0"])


@pytest.mark.parametrize("choice", ["token_tis", "sequence_tis", "token_mask", "sequence_mask"])
def test_a_correction_needs_log_probs_of_the_trainers_own(choice: str):
    (message,) = messages(f"algorithm.correction={choice}", "algorithm.old_logprobs=rollout")
    assert message == (
        f"algorithm.correction: is {choice}, but with algorithm.old_logprobs=rollout there are no log-probs of the "
        "trainer's to compare with -> set algorithm.old_logprobs=auto or recompute, or algorithm.correction=none"
    )
    for cure in ("algorithm.old_logprobs=auto", "algorithm.old_logprobs=recompute", "algorithm.old_logprobs=update"):
        load_config(None, [*ENOUGH, f"algorithm.correction={choice}", cure])


def test_the_range_of_a_correction_has_two_ends_where_it_uses_both():
    (message,) = messages("algorithm.correction=sequence_tis", "algorithm.correction_range=[0.5, 3.0]")
    assert message == (
        "algorithm.correction_range: is [0.5, 3.0], but with algorithm.correction=sequence_tis ratios are cut above "
        "only -> set algorithm.correction_range=[0.0, 3.0], or algorithm.correction=sequence_mask for both sides"
    )
    load_config(None, [*ENOUGH, "algorithm.correction=sequence_mask", "algorithm.correction_range=[0.5, 3.0]"])
    (message,) = messages("algorithm.correction_range=[1.0, 1.0]")
    assert "no ratio but 1 is inside" in message
    for ends in ("[0.5, 0.9]", "[1.1, 2.0]", "[-0.5, 2.0]", "[2.0]"):
        assert messages(f"algorithm.correction_range={ends}")[0].startswith("algorithm.correction_range")


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("rollout.top_p=0.9", "rollout.top_p=1.0 for no filter"),
        ("rollout.top_k=20", "rollout.top_k=null for no filter"),
        ("model.dtype=bfloat16", "model.dtype=float32"),
        ("model.head_dtype=bfloat16", "model.head_dtype=float32"),
    ],
)
def test_fault_22_old_logprobs_of_another_distribution_or_precision_are_refused(override: str, remedy: str):
    (message,) = messages("algorithm.old_logprobs=rollout", override)
    assert message.endswith(f"-> set algorithm.old_logprobs=recompute, or auto; or {remedy}")
    load_config(None, [*ENOUGH, "algorithm.old_logprobs=recompute", override])


@pytest.mark.parametrize(
    ("overrides", "starts"),
    [
        (
            [NEW],
            ["model.new: is given, and model.path too", "model.tokenizer: is missing: a new model brings no tokenizer"],
        ),
        (["model.path=null", "model.new={hidden_size: 8}", "model.tokenizer=x"], ["model.new: names no architecture"]),
        (["data.train=rows.py"], ["data.train: rows.py is Python code without the name of a function"]),
        (["data.train=[{path: a.parquet}, {path: rows.py}]"], ["data.train: rows.py is Python code"]),
        (["data.chat_template=chatml"], ["data.chat_template: got chatml, expected auto, always, never or the path"]),
        (["data.chat_template=never", "data.system_prompt=x"], ["data.system_prompt: a system prompt needs a chat"]),
        (["sft.train=x.parquet"], ["sft.steps: is 0, although sft.train is given"]),
        (["sft.steps=3"], ["sft.train: is missing, although sft.steps is 3"]),
        (["reward.function=my_reward.py"], ["reward.function: my_reward.py is a file without the name of a function"]),
        (["reward.function={gsm8k: last_number, x: a.py}"], ["reward.function: a.py is a file without"]),
        (["reward.function=[maths, maths]"], ["reward.function: names maths twice -> use reward.weights"]),
        (
            ["reward.function=[maths, my.py:short]", "reward.weights={shrt: 0.1}"],
            ["reward.weights: weighs shrt, which is not in reward.function -> the names are maths, short"],
        ),
        (["trainer.offload=host", "cluster.device=cpu"], ["trainer.offload: is host, but on a CPU the host's memory"]),
        (["evaluation.data=x", "evaluation.metric=accuracy"], ["evaluation.metric: got accuracy, expected pass@k"]),
        (["evaluation.data=x", "evaluation.metric=pass@0"], ["evaluation.metric: got pass@0, expected pass@k"]),
        (
            ["evaluation.data=x", "evaluation.n=4", "evaluation.metric=pass@8"],
            [
                "evaluation.metric: is pass@8, but with evaluation.n=4 what is estimated is pass@1, pass@2, pass@4 -> "
                "take one of these, or set evaluation.n=8"
            ],
        ),
        (
            ["evaluation.data=x", "evaluation.n=8", "evaluation.metric=pass@3"],
            ["evaluation.metric: is pass@3, but with evaluation.n=8 what is estimated is pass@1, pass@2, pass@4"],
        ),
        (
            ["evaluation.data={hard: x, easy: y}", "evaluation.metric=hrd/pass@1"],
            ["evaluation.metric: is hrd/pass@1, but evaluation.data has no set hrd -> the sets are hard, easy"],
        ),
        (
            ["evaluation.data=x", "evaluation.n=4", "evaluation.temperature=0"],
            ["evaluation.n: is 4, but at evaluation.temperature=0 all responses to a prompt are the same"],
        ),
    ],
)
def test_fault_44_settings_that_contradict_each_other_are_refused(overrides: list[str], starts: list[str]):
    found = messages(*overrides)
    assert len(found) == len(starts)
    for message, start in zip(found, starts, strict=True):
        assert message.startswith(start)


@pytest.mark.parametrize(
    "overrides",
    [
        ["reward.function=[a.py:f, b.py:f]", 'reward.weights={"a.py:f": 0.5}'],
        ["reward.function=[a.py:f, maths]", "reward.weights={f: 0.5}"],
        ["evaluation.data={a: x, b: y}", "evaluation.n=4", "evaluation.metric=a/pass@4"],
        ["evaluation.data={a: x, b: y}", "evaluation.n=3", "evaluation.metric=a/some_source/pass@3"],
        ["evaluation.data=x", "evaluation.metric=some_source/pass@1"],
        ["evaluation.data=x", "evaluation.temperature=0"],
        ["rollout.top_p=0.9"],
        ["trainer.offload=host", "cluster.device=cuda"],
        ["trainer.offload=disk", "cluster.device=cpu"],
        ["cluster.num_workers=8", "rollout.tensor_parallel=4", "trainer.replicas=2", "data.prompts_per_step=1"],
        ["data.chat_template=mine.jinja", "data.system_prompt=x"],
        ["sft.train=x.parquet", "sft.steps=3"],
        ["model.path=null", NEW, "model.tokenizer=x"],
    ],
)
def test_settings_that_fit_together_pass(overrides: list[str]):
    load_config(None, [*ENOUGH, *overrides])
