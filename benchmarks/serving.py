"""Streaming from `pardraft serve` beside `transformers serve`: tokens a second as a client sees them, for one client and several.

    python benchmarks/serving.py
    python benchmarks/serving.py --target Qwen/Qwen3-8B --drafters z-lab/Qwen3-8B-DFlash-b16 --prompts prompts.txt

Without a target, the shipped demo family completes code that it knows. All servers run at once, each a process of its own with
one thread for its matrices, and take turns on the prompts; an `openai` client streams from them over localhost. Of each prompt
the fastest of `--repeats` answers counts; one before them teaches the schedule. Seconds are those from a request to the last
token. Several clients ask together, and the server writes their texts one after the other: seconds are those from the first
request to the last token. A busy machine slows all servers down, so a row also says how much time of a processor the server
took. Texts and counts of tokens are compared with those of the server without a drafter.
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import psutil

from hf_pardraft.demo.family import DRAFTER_NAMES, SHIPPED_FAMILY
from hf_pardraft.demo.prompts import built_in_prompts
from result_files import RESULTS, public_command, save, this_machine

PLAIN = "without a drafter"
OPTIONS = ("--dtype", "float32", "--device", "cpu", "--log-level", "error")


@dataclass
class Server:
    """A server that answers on a port of this machine."""

    name: str
    model: str
    port: int
    process: psutil.Popen

    def stream(self, prompt: str, max_tokens: int) -> tuple[str, int]:
        """The text that a client of its own gets, and how many tokens the server counts."""
        with openai.OpenAI(base_url=f"http://localhost:{self.port}/v1", api_key="none", max_retries=0) as client:
            chunks = [*client.completions.create(model=self.model, prompt=prompt, max_tokens=max_tokens, stream=True)]
        return "".join(chunk.choices[0].text for chunk in chunks), chunks[-1].usage.completion_tokens

    def processor_seconds(self) -> float:
        times = self.process.cpu_times()
        return times.user + times.system


@contextmanager
def running(name: str, target: str, drafter: str | None) -> Iterator[Server]:
    """A server that answers, until the end of the block."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    entry = ["transformers.cli.transformers", "serve", target]
    if drafter is not None:
        entry = ["hf_pardraft", "serve", "--target", target, "--drafter", drafter]
    with tempfile.TemporaryFile() as log:
        command = [sys.executable, "-m", *entry, *OPTIONS, "--port", str(port)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = psutil.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            while not answers(port):
                if process.poll() is not None:
                    log.seek(0)
                    sys.exit(f"{name} did not start: {log.read().decode()}")
                time.sleep(0.2)
            yield Server(name, target, port, process)
        finally:
            process.terminate()
            process.wait()


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", port)) == 0


def ask(server: Server, prompts: list[str], max_tokens: int) -> dict[str, Any]:
    """Stream all prompts, each to a client of its own, at once; what came, and what it took."""
    before, begin = server.processor_seconds(), time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as clients:
        answered = [*clients.map(lambda prompt: server.stream(prompt, max_tokens), prompts)]
    seconds = time.perf_counter() - begin
    return {
        "answers": answered,
        "tokens": sum(count for _, count in answered),
        "seconds": seconds,
        "processor_seconds": server.processor_seconds() - before,
    }


def measure(servers: list[Server], groups: list[list[str]], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each server: the best answers to groups of prompts, each asked for together."""
    runs: dict[str, list[list[dict[str, Any]]]] = {server.name: [[] for _ in groups] for server in servers}
    for _ in range(1 + arguments.repeats):
        for index, group in enumerate(groups):
            for server in servers:
                runs[server.name][index].append(ask(server, group, arguments.max_tokens))
    expected = [tries[0]["answers"] for tries in runs[PLAIN]]
    rows = []
    for name, of_server in runs.items():
        timed = [tries[1:] for tries in of_server]
        tokens = sum(tries[0]["tokens"] for tries in timed)
        seconds, processor = (
            sum(min(run[what] for run in tries) for tries in timed) for what in ("seconds", "processor_seconds")
        )
        same = all(
            run["answers"] == answers for tries, answers in zip(of_server, expected, strict=True) for run in tries
        )
        rows.append(
            {
                "server": name,
                "clients": len(groups[0]),
                "tokens": tokens,
                "tokens_per_second": round(tokens / seconds, 1),
                "processor_ms_per_token": round(1000 * processor / tokens, 3),
                "same_answers": same,
            }
        )
    return rows


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(SHIPPED_FAMILY / "target"))
    parser.add_argument("--drafters", nargs="+", default=[str(SHIPPED_FAMILY / folder) for folder in DRAFTER_NAMES])
    parser.add_argument("--prompts", type=Path, help="a file with a prompt in each line")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--output", type=Path, default=RESULTS / "serving.json")
    return parser.parse_args()


def main() -> None:
    arguments = read_arguments()
    prompts = arguments.prompts.read_text(encoding="utf-8").splitlines() if arguments.prompts else built_in_prompts()
    rows = []
    with ExitStack() as stack:
        named = {
            PLAIN: None,
            **{DRAFTER_NAMES.get(Path(path).name, Path(path).name): path for path in arguments.drafters},
        }
        servers = [stack.enter_context(running(name, arguments.target, path)) for name, path in named.items()]
        for count in arguments.clients:
            groups = [prompts[start : start + count] for start in range(0, len(prompts), count)]
            rows += measure(servers, groups, arguments)
            for row in rows[-len(servers) :]:
                print(row)
    save(arguments.output, {"command": public_command(), "machine": this_machine(), "rows": rows})


if __name__ == "__main__":
    main()
