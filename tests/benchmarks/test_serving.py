"""The benchmark of servers asks all of them for the same, and says where answers differ."""

import argparse

import pytest

pytest.importorskip("openai")
pytest.importorskip("psutil")

import serving


class StandIn:
    """Answers as it is told, and takes a second of a processor for each token."""

    def __init__(self, name, text):
        self.name, self.text, self.asked, self.seconds = name, text, [], 0.0

    def stream(self, prompt, max_tokens):
        self.asked.append(prompt)
        self.seconds += max_tokens
        return prompt + self.text, max_tokens

    def processor_seconds(self):
        return self.seconds


def test_every_server_gets_every_prompt_as_often_and_other_answers_are_told():
    servers = [StandIn(serving.PLAIN, "x"), StandIn("right", "x"), StandIn("wrong", "y")]
    options = argparse.Namespace(max_tokens=5, repeats=2)
    rows = serving.measure(servers, [["a", "b"], ["c"]], options)
    assert [(row["server"], row["same_answers"]) for row in rows] == [
        (serving.PLAIN, True),
        ("right", True),
        ("wrong", False),
    ]
    assert {(row["clients"], row["tokens"], row["processor_ms_per_token"]) for row in rows} == {(2, 15, 1000)}
    assert all(sorted(server.asked) == ["a"] * 3 + ["b"] * 3 + ["c"] * 3 for server in servers)
    assert all(row["tokens_per_second"] > 0 for row in rows)
