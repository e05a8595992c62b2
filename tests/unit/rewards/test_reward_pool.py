"""The pool of workers: scores in order, functions of every kind, and what workers may see."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.config.reward import RewardConfig
from tandem.errors import RewardError
from tandem.rewards.pool import start_rewards
from tandem.rewards.sample import Sample, Score

CASES = Path(__file__).with_name("reward_cases.py")


def scores_of(name: str, samples: list[Sample], **settings: Any) -> list[Score]:
    with start_rewards(RewardConfig(function=f"{CASES}:{name}", **settings)) as pool:
        return pool.gather([pool.submit(sample) for sample in samples])


def test_scores_come_in_the_order_of_the_tickets() -> None:
    with start_rewards(RewardConfig(function=f"{CASES}:tell", workers=3)) as pool:
        tickets = [pool.submit(Sample(str(number))) for number in range(50)]
        assert [score.value for score in pool.gather(tickets[::-1])] == list(range(49, -1, -1))
        later = pool.submit(Sample("7"))
        assert pool.gather([later])[0].value == 7.0
        assert pool.gather([]) == []


def test_samples_that_no_socket_takes_in_one_go() -> None:
    with start_rewards(RewardConfig(workers=2), lambda response, ground_truth: len(response)) as pool:
        tickets = [pool.submit(Sample("x" * size)) for size in (4_000_000, 1, 5_000_000, 2, 6_000_000)]
        assert [score.value for score in pool.gather(tickets)] == [4_000_000, 1, 5_000_000, 2, 6_000_000]


def test_a_ticket_is_good_for_one_score() -> None:
    with start_rewards(RewardConfig(function="exact_match", workers=1)) as pool:
        ticket = pool.submit(Sample("4", ground_truth=4))
        with pytest.raises(ValueError, match="given twice"):
            pool.gather([ticket, ticket])
        assert pool.gather([ticket])[0].value == 1.0
        for tickets in ([ticket], [99]):
            with pytest.raises(ValueError, match="unknown, used or given twice"):
                pool.gather(tickets)


def test_workers_import_no_torch_and_share_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "not for reward functions")
    (score,) = scores_of("tell", [Sample("1")])
    assert score.metrics["reward/heavy"] == 0.0
    (score,) = scores_of("environment", [Sample("1")])
    assert score.metrics == {"reward/secret": 0.0, "reward/path": 1.0}


def test_all_workers_work() -> None:
    """A call that waits for its neighbour ends only if there are two processes."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)  # workers of root may run as nobody
        scores = scores_of("pair", [Sample(name, extra_info=folder) for name in "ab"], workers=2)
    assert [score.value for score in scores] == [1.0, 1.0]


TRUTHS = [4, 4.5, "4", None, True, [1, [2, "x"]], (1, 2), {"a": [1]}, np.array([[1, 2]]), np.float32(0.5), b"\x00", {3}]


def test_fault_35_the_truth_reaches_the_function_unchanged() -> None:
    samples = [Sample(f"{type(t).__name__} {t!r} {[t]!r}", ground_truth=t, extra_info=[t]) for t in TRUTHS]
    assert [score.value for score in scores_of("same", samples)] == [1.0] * len(TRUTHS)


def test_a_sample_that_cannot_leave_the_process_has_no_score() -> None:
    bad, good = scores_of("tell", [Sample("1", extra_info=threading.Lock()), Sample("2")])
    assert bad.value is None
    assert "cannot be sent to a worker process" in str(bad.error)
    assert good.value == 2.0


def test_a_sample_that_the_worker_cannot_read_has_no_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module_of_the_truth.py").write_text("class Truth: pass")
    with start_rewards(RewardConfig(function="exact_match", workers=1)) as pool:
        monkeypatch.syspath_prepend(tmp_path)  # too late for the workers
        from module_of_the_truth import Truth  # type: ignore[import-not-found]

        bad, good = pool.gather([pool.submit(Sample("4", ground_truth=truth)) for truth in (Truth(), 4)])
    assert bad.value is None
    assert "ModuleNotFoundError: No module named 'module_of_the_truth'" in str(bad.error)
    assert good.value == 1.0


def test_a_function_of_this_process_with_what_it_closes_over() -> None:
    worth = 3.0
    with start_rewards(
        RewardConfig(workers=1), lambda response, ground_truth: worth * (response == ground_truth)
    ) as pool:
        tickets = [pool.submit(Sample("a", ground_truth=truth)) for truth in "ab"]
        assert [score.value for score in pool.gather(tickets)] == [3.0, 0.0]


def test_a_function_of_a_script_or_notebook(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from dataclasses import dataclass\n"
        "from tandem.config.reward import RewardConfig\n"
        "from tandem.rewards.pool import start_rewards\n"
        "from tandem.rewards.sample import Sample\n"
        "@dataclass\n"
        "class Truth:\n"
        "    text: str\n"
        "WORTH = 2.0\n"
        "def judge(text, truth):\n"
        "    assert isinstance(truth, Truth)\n"
        "    return WORTH if text == truth.text else 0.0\n"
        "with start_rewards(RewardConfig(), judge) as pool:\n"
        "    score, = pool.gather([pool.submit(Sample('a', ground_truth=Truth('a')))])\n"
        "    print(score.value, score.error)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, check=False)
    assert (done.stdout, done.stderr) == ("2.0 None\n", "")


def test_asynchronous_calls_are_in_flight_together() -> None:
    samples = [Sample("x", ground_truth=8) for _ in range(8)]
    scores = scores_of("meet", samples, workers=1, concurrency=8)
    assert [score.value for score in scores] == [1.0] * 8


def test_concurrency_is_the_limit_over_all_workers() -> None:
    for concurrency, workers, per_worker in [(4, 1, 4), (4, 2, 2), (1, 2, 1)]:
        scores = scores_of("crowd", [Sample("x")] * 40, workers=workers, concurrency=concurrency)
        assert max(score.metrics["reward/crowd"] for score in scores) <= per_worker


def test_a_batched_function_is_called_once_for_each_worker() -> None:
    samples = [Sample(str(number), ground_truth=str(number % 5)) for number in range(10)]
    scores = scores_of("batch", samples, workers=2, batched=True)
    assert [score.value for score in scores] == [1.0] * 5 + [0.0] * 5
    assert {score.metrics["reward/size"] for score in scores} == {5.0}


def test_a_batched_function_gets_32_at_a_time_and_what_is_left_for_each_worker() -> None:
    samples = [Sample(str(number), ground_truth=str(number)) for number in range(70)]
    scores = scores_of("batch", samples, workers=2, batched=True)
    assert [score.value for score in scores] == [1.0] * 70
    assert [score.metrics["reward/size"] for score in scores] == [32.0] * 64 + [3.0] * 6


def test_a_batched_function_is_called_while_more_responses_come() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        start_rewards(RewardConfig(function=f"{CASES}:call_home", workers=1, batched=True)) as pool,
    ):
        server.settimeout(60)
        first = [pool.submit(Sample("x", extra_info=server.getsockname()[1])) for _ in range(32)]
        connection, _ = server.accept()  # it has been called, although nobody has asked for scores
        connection.close()
        assert [score.value for score in pool.gather(first)] == [32.0] * 32


def test_a_class_is_made_once_in_each_worker_before_the_first_call() -> None:
    with start_rewards(RewardConfig(function=f"{CASES}:Counter", workers=1, options={"start": 5})) as pool:
        tickets = [pool.submit(Sample("x")) for _ in range(3)]
        assert [score.value for score in pool.gather(tickets)] == [6.0, 7.0, 8.0]


def test_a_class_that_needs_more_memory_than_a_worker_has_is_told_at_the_start() -> None:
    config = RewardConfig(function=f"{CASES}:Counter", workers=1, options={"gib": 2}, memory_gib=0.5)
    with pytest.raises(RewardError, match=r"(?s)while it loaded the function.*MemoryError.*reward.memory_gib may be"):
        start_rewards(config)


def test_options_reach_the_function() -> None:
    config = RewardConfig(function="format_regex", options={"pattern": "^a+$"}, workers=1)
    with start_rewards(config) as pool:
        tickets = [pool.submit(Sample(response)) for response in ("aa", "ab")]
        assert [score.value for score in pool.gather(tickets)] == [1.0, 0.0]


def test_maths_runs_in_a_worker() -> None:
    with start_rewards(RewardConfig(function="maths", workers=1)) as pool:
        ticket = pool.submit(Sample(r"\boxed{\frac12}", ground_truth="0.5"))
        assert pool.gather([ticket])[0].value == 1.0


@pytest.mark.parametrize(
    ("config", "reward", "message"),
    [
        (RewardConfig(), None, "there is no reward function"),
        (RewardConfig(function="maths"), len, "there are two reward functions"),
        (RewardConfig(function="math"), None, "did you mean maths"),
        (RewardConfig(function=f"{CASES}:nothing"), None, "has no 'nothing'"),
        (RewardConfig(), lambda text: 1.0, "asks for text"),
        (RewardConfig(), threading.Lock().acquire, "cannot be sent to a worker process"),
        (RewardConfig(function="maths", options={"a": threading.Lock()}), None, "cannot be sent to a worker process"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_at_the_start(config: Any, reward: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        start_rewards(config, reward)


def test_a_closed_pool_says_so_and_closes_again() -> None:
    pool = start_rewards(RewardConfig(function="exact_match", workers=1))
    ticket = pool.submit(Sample("4", ground_truth=4))
    pool.gather([ticket])
    pool.close()
    pool.close()
    ticket = pool.submit(Sample("4", ground_truth=4))
    with pytest.raises(RewardError, match="the reward pool is closed"):
        pool.gather([ticket])
