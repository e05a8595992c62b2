"""Reward functions that misbehave: their response has no score, the others have theirs, and nothing is left over."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tandem.config.reward import RewardConfig
from tandem.errors import RewardError
from tandem.rewards.isolation import NOBODY
from tandem.rewards.pool import start_rewards
from tandem.rewards.sample import Sample, Score

CASES = Path(__file__).with_name("reward_cases.py")
FAULTS = {
    "loop": "no answer within reward.timeout_s=0.7",
    "hang in C": "no answer within reward.timeout_s=0.7",
    "print without end": "no answer within reward.timeout_s=0.7",
    "exit": "the worker process ended with exit status 7 during the call",
    "crash": "the worker process was killed by signal 11",
    "eat memory": "out of memory: the function needs more than reward.memory_gib",
    "close everything": "the worker process broke off its connection during the call",
    "write to us": "the worker's connection was written to by the reward function",
    "raise": "reward function misbehave raised KeyError: 'no such thing'",
    "leave": "reward function misbehave raised SystemExit: 3",
}


HANGING = {"loop", "hang in C", "print without end", "start a child", "wait for ever", "block", "cling"}


def score_all(name: str, responses: list[str], **settings: Any) -> list[Score]:
    """Scores of the responses; the time limit is short only where one of them waits for it."""
    timeout_s = 0.7 if HANGING & set(responses) else 60.0
    config = RewardConfig(function=f"{CASES}:{name}", timeout_s=timeout_s, memory_gib=0.125, **settings)
    with start_rewards(config) as pool:
        return pool.gather([pool.submit(Sample(response)) for response in responses])


def has_ended(pid: int) -> bool:
    """Whether the process ends within 20 s; the kernel wakes us when it does."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 20)[0])
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_31_and_32_a_bad_call_costs_one_score_only(fault: str) -> None:
    responses = ["good", fault, "good", "good"]
    scores = score_all("misbehave", responses, workers=1)
    assert [score.value for score in scores] == [1.0, None, 1.0, 1.0]
    assert str(scores[1].error).startswith(FAULTS[fault])
    assert scores[0].error is None
    if fault != "print without end":
        assert scores[1].output == f"asked to {fault}\n"
    assert scores[2].output == "asked to good\n"


def test_a_function_that_prints_without_end_is_kept_short() -> None:
    (score,) = score_all("misbehave", ["print without end"])
    assert len(score.output) < 5000
    assert re.match(r"\(\d+ bytes left out\) \.\.\.", score.output)


def test_what_a_call_had_in_its_hands_when_it_raised_is_let_go() -> None:
    scores = score_all("misbehave", ["raise with full hands"] * 12, workers=1)  # 480 MiB in all, the limit is 128
    assert {str(score.error).splitlines()[0] for score in scores} == {
        "reward function misbehave raised ValueError: 41943040 bytes"
    }


def test_a_lower_limit_of_memory_that_the_process_came_with_stays() -> None:
    command = (
        "import resource\n"
        "from tandem.rewards.isolation import limit_memory\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (2**30, 2**30))\n"
        "limit_memory(2**31)\n"
        "print(resource.getrlimit(resource.RLIMIT_DATA))\n"
        "limit_memory(2**29)\n"
        "print(resource.getrlimit(resource.RLIMIT_DATA))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == f"{(2**30, 2**30)}\n{(2**29, 2**29)}\n"


def test_a_function_that_reads_gets_the_end_of_the_input() -> None:
    (score,) = score_all("misbehave", ["read"])
    assert score.value == 0.0


def test_fault_34_what_is_no_number_has_no_score() -> None:
    config = RewardConfig(function=f"{CASES}:returns", workers=1)
    with start_rewards(config) as pool:
        truths = [None, float("nan"), "1", [1.0], True]
        scores = pool.gather([pool.submit(Sample("x", ground_truth=truth)) for truth in truths])
    assert [score.value for score in scores] == [None, None, None, None, 1.0]
    assert all("reward function returns returned" in str(score.error) for score in scores[:4])


def test_what_a_function_has_started_ends_with_it() -> None:
    (score,) = score_all("misbehave", ["start a child"])
    found = re.search(r"child (\d+)", score.output)
    assert found is not None
    assert has_ended(int(found[1]))


def test_a_thread_that_goes_on_does_not_hold_up_the_end() -> None:
    assert [score.value for score in score_all("misbehave", ["start a thread", "good"], workers=1)] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("wait for ever", "no answer within reward.timeout_s=0.7"),
        ("block", "no answer within reward.timeout_s=0.7"),
        ("cling", "no answer within reward.timeout_s=0.7"),
        ("exit", "the worker process ended with exit status 7 during the call"),
        ("raise", "reward function asynchronous raised ValueError: not today"),
        ("time out by itself", "reward function asynchronous raised TimeoutError: the judge is slow"),
        ("cancel", "the reward function was cancelled from within"),
        ("eat memory", "out of memory"),
    ],
)
def test_fault_31_an_asynchronous_call_costs_none_of_its_neighbours_their_score(fault: str, error: str) -> None:
    scores = score_all("asynchronous", ["1", "2", fault, "3", "4", "5"], workers=1, concurrency=4)
    assert [score.value for score in scores] == [1.0, 2.0, None, 3.0, 4.0, 5.0]
    assert str(scores[2].error).startswith(error)


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ("raise", "reward function batch raised ValueError: a bad batch"),
        ("one number", "reward function batch returned the number 1.0 for a batch of 2, not a list"),
        ("too few", "reward function batch returned 1 values for a batch of 2"),
    ],
)
def test_fault_34_a_bad_batch_costs_its_own_rows(bad: str, error: str) -> None:
    scores = score_all("batch", ["x", bad, "y", "z"], workers=2, batched=True)
    assert [score.value for score in scores] == [None, None, 0.0, 0.0]
    assert all(str(score.error).startswith(error) for score in scores[:2])


def test_the_time_limit_starts_with_the_function_not_in_the_queue() -> None:
    def slow(response: str) -> float:
        import time

        time.sleep(0.3)
        return 1.0

    with start_rewards(RewardConfig(workers=1, timeout_s=1.0), slow) as pool:
        scores = pool.gather([pool.submit(Sample("x")) for _ in range(4)])  # 1.2 s in all
    assert [score.value for score in scores] == [1.0] * 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import os; os._exit(5)", "a reward worker ended with exit status 5 while it loaded the function"),
        ("print('hello'); bytearray(2**30)", "(?s)killed|ended with exit status 1 while.*hello.*MemoryError"),
    ],
)
def test_a_file_that_ends_the_worker_when_it_is_imported(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(f"{text}\ndef good(response): return 1")
    with pytest.raises(RewardError, match=message):
        start_rewards(RewardConfig(function=f"{tmp_path}/mine.py:good", memory_gib=0.125))


def test_a_file_that_goes_bad_during_the_run_ends_the_waiting(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import os\ndef good(response): os._exit(1)")
    with start_rewards(RewardConfig(function=f"{file}:good", workers=1)) as pool:
        file.unlink()
        tickets = [pool.submit(Sample("x")) for _ in range(3)]
        with pytest.raises(RewardError, match="there is no file"):
            pool.gather(tickets)


SCRIPT = """
import os, signal, sys, tempfile
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its background jobs ignore it
from tandem.config.reward import RewardConfig
from tandem.rewards.pool import start_rewards
from tandem.rewards.sample import Sample
pool = start_rewards(RewardConfig(function=sys.argv[1] + ":tell", workers=2))
scores = pool.gather([pool.submit(Sample("1")) for _ in range(20)])
hanging = start_rewards(RewardConfig(function=sys.argv[1] + ":misbehave", workers=1, timeout_s=600))
with tempfile.TemporaryDirectory() as folder:
    os.mkfifo(folder + "/pipe")
    os.chmod(folder, 0o777)
    os.chmod(folder + "/pipe", 0o777)
    pid = hanging.submit(Sample("tell the pid"))
    hangs = hanging.submit(Sample("hang in C", ground_truth=folder + "/pipe"))
    pids = {int(score.metrics["reward/pid"]) for score in [*scores, *hanging.gather([pid])]}
    open(folder + "/pipe").read()  # until it hangs
print(*pids, flush=True)
hanging.gather([hangs])
"""


def started_script() -> tuple[subprocess.Popen[str], list[int]]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(CASES)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    assert process.stdout is not None
    return process, [int(pid) for pid in process.stdout.readline().split()]


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels tell a process nothing of its parent's end")
def test_no_worker_outlives_a_killed_controller() -> None:
    process, workers = started_script()
    with process:
        assert len(workers) >= 2
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=20)
    assert all(has_ended(pid) for pid in workers)


@pytest.mark.skipif(sys.platform != "linux", reason="pidfd_open is Linux's")
def test_ctrl_c_while_waiting_ends_controller_and_workers() -> None:
    process, workers = started_script()
    with process:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert "KeyboardInterrupt" in errors
    assert all(has_ended(pid) for pid in workers)


DROP = "import os, sys; from tandem.rewards.isolation import drop_root; print(drop_root(sys.argv[1:]), *os.getresuid())"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become somebody else")
def test_root_becomes_nobody_if_nobody_can_read_what_is_needed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir(mode=0o700)

    def outcome(*needed: str) -> str:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", DROP, *needed]
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout.strip()

    assert outcome("/", "/not there") == f"True {NOBODY} {NOBODY} {NOBODY}"
    assert outcome("/", str(secret)) == "False 0 0 0"


@pytest.mark.parametrize(("deaths", "lives"), [(2, True), (3, False)])
def test_a_replacement_that_is_killed_while_it_loads_is_tried_again(tmp_path: Path, deaths: int, lives: bool) -> None:
    tmp_path.chmod(0o777)
    loads = tmp_path / "loads"
    file = tmp_path / "reward.py"
    file.write_text(
        f"import os\n"
        f"with open({str(loads)!r}, 'a') as loads: loads.write('.')\n"
        f"if 1 < os.path.getsize({str(loads)!r}) <= {1 + deaths}: os.kill(os.getpid(), 9)\n"
        f"def score(response, ground_truth): return os._exit(1) if response == 'exit' else 1.0\n"
    )
    with start_rewards(RewardConfig(function=f"{file}:score", workers=1)) as pool:
        tickets = [pool.submit(Sample("exit")), pool.submit(Sample("good"))]
        if lives:
            assert [score.value for score in pool.gather(tickets)] == [None, 1.0]
        else:
            with pytest.raises(RewardError, match=r"was killed by signal 9 .* while it loaded the function"):
                pool.gather(tickets)


def test_bounds_beyond_what_the_system_takes_are_no_bounds() -> None:
    config = RewardConfig(function="last_number", workers=1, timeout_s=1e10, memory_gib=1e10)
    with start_rewards(config) as pool:
        assert [score.value for score in pool.gather([pool.submit(Sample("4", ground_truth="4"))])] == [1.0]
