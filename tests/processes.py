"""Work in processes of its own: one that may be killed, at a chosen place if need be, or several that train together (gloo).

Processes are forked, so that the work may be any function and nothing has to be imported again.
"""

import os
import pickle
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType

from progress_lock import take_own_progress_lock

# What the interpreter reports before it is done; `os.replace` is called a rename, too.
CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def begin(work: Callable[[], Any]) -> int:
    """Begin `work` in a forked process: its id, for `os.waitpid`."""
    process = os.fork()
    if process == 0:
        _run(work)
    return process


def is_running(process: int) -> bool:
    """Whether a process that was begun has not ended."""
    return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def in_a_process(work: Callable[[], Any]) -> int:
    """Run `work` in a forked process: its exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(begin(work), 0)[1])


def num_changes(work: Callable[[], Any], folder: Path) -> int:
    """How often `work`, in a process of its own, changes something in `folder`."""
    with tempfile.TemporaryDirectory() as scratch:
        note = Path(scratch) / "count"

        def counted() -> None:
            seen = []
            _on_each_change(folder, lambda: seen.append(1))
            work()
            count = len(seen)
            note.write_bytes(pickle.dumps(count))

        assert in_a_process(counted) == 0
        return pickle.loads(note.read_bytes())


def kill_before_change(work: Callable[[], Any], folder: Path, place: int) -> bool:
    """Run `work` in a process of its own and kill it before its change number `place`; whether it came to that."""

    def doomed() -> None:
        seen = []

        def count() -> None:
            seen.append(1)
            if len(seen) == place:
                os.kill(os.getpid(), signal.SIGKILL)

        _on_each_change(folder, count)
        work()

    code = in_a_process(doomed)
    assert code in (0, -signal.SIGKILL), f"exit code {code}: see the trace above"
    return code != 0


def _on_each_change(folder: Path, notice: Callable[[], None]) -> None:
    place = str(folder.resolve())

    def hook(event: str, arguments: tuple) -> None:
        if event == "open":
            path, _, flags = arguments
            is_change = isinstance(flags, int) and bool(flags & WRITING)
        else:
            # Inside of a tree that is removed, names come with the folder's descriptor.
            path, is_change = arguments[0] if arguments else None, event in CHANGES
        if is_change and isinstance(path, (str, bytes, os.PathLike)):
            path = os.fsdecode(path)
            if not os.path.isabs(path) or path.startswith(place):
                notice()

    # It stays as long as the process, which is short.
    sys.addaudithook(hook)


def in_processes(work: Callable[[int], Any], count: int = 2, **environment: str) -> list[Any]:
    """Run `work(rank)` in `count` processes that form a group, as `accelerate launch` would start them.

    Args:
        work: what each does; its result must be something that pickle takes.
        environment: variables that a launcher would set besides, such as `ACCELERATE_USE_FSDP="true"`.

    Returns:
        The results, by rank.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = [Path(folder) / str(rank) for rank in range(count)]
        port = free_port()
        processes = []
        for rank in range(count):
            process = os.fork()
            if process == 0:
                _run(lambda rank=rank: _work_of(rank, count, port, environment, work, results[rank]))
            processes.append(process)
        codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
        assert codes == [0] * count, f"exit codes {codes}: see the traces above"
        return [pickle.loads(result.read_bytes()) for result in results]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def _work_of(rank: int, count: int, port: int, environment: dict, work: Callable[[int], Any], result: Path) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true",
        **environment,
    }
    if environment.get("ACCELERATE_USE_FSDP") == "true":
        _let_accelerate_shard_on_the_cpu()
    if environment.get("ACCELERATE_USE_DEEPSPEED") == "true":
        _let_accelerate_use_deepspeed_on_the_cpu()
    # What an earlier trainer of the parent's noted is of one process.
    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()
    result.write_bytes(pickle.dumps(work(rank)))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def _let_accelerate_shard_on_the_cpu() -> None:
    """PyTorch's FSDP2 works on the CPU; accelerate only looks for its settings where it believes in accelerators."""
    initialise = PartialState.__init__

    def initialise_as_accelerated(self, *arguments: Any, **options: Any) -> None:
        initialise(self, *arguments, **options)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = initialise_as_accelerated


def _let_accelerate_use_deepspeed_on_the_cpu() -> None:
    """accelerate forgets DeepSpeed where the launcher asks for the CPU, though not where the training arguments do."""
    import deepspeed

    os.environ |= {"ACCELERATE_USE_CPU": "false", "DS_ACCELERATOR": "cpu"}
    # What would be compiled here, for minutes, is only another way to exchange tensors: gloo has its own.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _run(work: Callable[[], Any]) -> None:
    """Run `work` and leave the process without what pytest does when one ends."""
    code = 1
    try:
        take_own_progress_lock()
        work()
        code = 0
    except BaseException:  # noqa: BLE001 - whatever it is, the parent's test run must not go on in here
        traceback.print_exc()
    finally:
        os._exit(code)
