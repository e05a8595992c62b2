"""examples/judge.py against a server of our own that speaks the chat completions protocol."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tandem.config.reward import RewardConfig
from tandem.rewards.pool import start_rewards
from tandem.rewards.sample import Sample, Score

JUDGE = Path(__file__).parents[2] / "examples" / "judge.py"
Answer = tuple[int, Any]  # HTTP status, and the text of the judge or the whole body


class Server(ThreadingHTTPServer):
    """Answers each question by `answer(question)`; keeps what it was asked."""

    daemon_threads = True

    def __init__(self, answer: Callable[[str], Answer]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer = answer
        self.requests: list[tuple[str, str | None, dict[str, Any]]] = []


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, self.headers["Authorization"], body))
        status, answer = self.server.answer(body["messages"][0]["content"])
        message = {"choices": [{"message": {"role": "assistant", "content": answer}}]}
        content = answer if isinstance(answer, bytes) else json.dumps(message).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        """Keep the tests' output clean."""


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[str], Answer]], Server]]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    servers: list[Server] = []

    def start(answer: Callable[[str], Answer]) -> Server:
        server = Server(answer)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def ask(server: Server, *responses: str, **options: Any) -> list[Score]:
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    config = RewardConfig(
        function=f"{JUDGE}:judge",
        options={"url": url, "model": "wise", "first_pause_s": 0.001, **options},
        workers=1,
        timeout_s=30,
    )
    with start_rewards(config) as pool:
        samples = [Sample(response, "What is 2 + 2?", ground_truth=4) for response in responses]
        return pool.gather([pool.submit(sample) for sample in samples])


def test_the_judge_s_grade_is_the_reward(serve: Any, tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("open sesame\n")
    server = serve(lambda question: (200, "Well.\nScore: 7" if "It is {four}." in question else "**Score**: **0**/10"))
    good, bad = ask(server, "It is {four}.", "It is five.", key_file=str(key_file))
    assert (good.value, bad.value) == (0.7, 0.0)
    assert good.metrics == {"reward/attempts": 1.0}
    path, authorization, body = server.requests[0]
    assert path == "/v1/chat/completions"
    assert authorization == "Bearer open sesame"
    assert body["model"] == "wise"
    assert "What is 2 + 2?" in body["messages"][0]["content"]
    assert "<reference>\n4\n</reference>" in body["messages"][0]["content"]


def test_a_busy_server_is_asked_again(serve: Any) -> None:
    answers = iter([(503, b"busy"), (429, b"slow down"), (200, "Score: 10")])
    server = serve(lambda question: next(answers))
    (score,) = ask(server, "4")
    assert score.value == 1.0
    assert score.metrics == {"reward/attempts": 3.0}


@pytest.mark.parametrize(
    ("answer", "error", "requests"),
    [
        ((500, b"no"), "HTTPStatusError: Server error '500", 3),
        ((401, b"who are you?"), "HTTPStatusError: Client error '401", 1),
        ((200, b"<html>"), "JSONDecodeError", 1),
        ((200, b'{"choices": []}'), "ValueError: the server's reply holds no text", 1),
        ((200, None), "ValueError: the server's reply holds no text", 1),
        ((200, "It is rather good."), "ValueError: the judge gave no score", 1),
        ((200, "<think>Score: 9?</think>Good."), "ValueError: the judge gave no score", 1),
        ((200, "Score: 11"), "ValueError: the judge's score 11 is not between 0 and 10", 1),
        ((200, "Score: -1"), "ValueError: the judge's score -1 is not between 0 and 10", 1),
    ],
)
def test_no_grade_is_no_reward_and_never_a_zero(serve: Any, answer: Answer, error: str, requests: int) -> None:
    server = serve(lambda question: answer)
    (score,) = ask(server, "4", attempts=3)
    assert score.value is None
    assert error in str(score.error)
    assert len(server.requests) == requests


def test_a_server_that_is_not_there() -> None:
    server = Server(lambda question: (200, ""))
    server.server_close()
    (score,) = ask(server, "4", attempts=2)
    assert score.value is None
    assert "ConnectError" in str(score.error)


def test_questions_are_on_their_way_together(serve: Any) -> None:
    """The server answers only when eight questions have come."""
    gate = threading.Barrier(8)

    def answer(question: str) -> Answer:
        gate.wait(timeout=20)
        return 200, "Score: 5"

    assert [score.value for score in ask(serve(answer), *["4"] * 8)] == [0.5] * 8
