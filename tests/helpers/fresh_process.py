"""Scripts in separate processes, on the CPU, which do not import torch and transformers anew: forks of a server
that has.

The server starts with the first call, before it has any thread; the workers of pytest-xdist share one. It has nothing
of packing_ops, and nothing of what tests have changed. multiprocessing's start method "forkserver" takes its processes
from the same server, in scripts too.
"""

import contextlib
import gc
import importlib
import multiprocessing
import os
import socket
import sys
import types
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
IMPORTED = [  # what is not installed is left out
    "hypothesis",
    "matplotlib.pyplot",
    "megatron.core.models.gpt.gpt_model",
    "pytest",
    "rich.progress",
    "torch",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
    "trl.trainer.sft_trainer",
]
ENVIRONMENT = dict(os.environ)  # of before any test
# What libraries read when they are imported. Some ask for GPUs then, which forks could not use.
SETTINGS = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


def start_server() -> None:
    """Before any use of the start method "forkserver"; what runs already stays."""
    kept = dict(os.environ)
    os.environ.clear()
    os.environ.update(ENVIRONMENT | SETTINGS)
    try:
        multiprocessing.set_forkserver_preload(IMPORTED)
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(kept)


def shared_server() -> dict:
    """For join_server: where a server is that lives as long as this process."""
    start_server()
    names = "_forkserver_address", "_forkserver_authkey"  # the second from Python 3.14 on
    return {name: getattr(forkserver._forkserver, name, None) for name in names}


def join_server(shared: dict) -> None:
    """Take processes from the server of a process that outlives this one, and from a new server once it has died."""
    server = forkserver._forkserver
    connect = server.connect_to_new_process

    def connect_or_start(fds):
        try:
            return connect(fds)
        except (ConnectionError, FileNotFoundError):  # a look in advance would end the server, which expects fds
            del server.ensure_running
            vars(server).update(_forkserver_address=None, _forkserver_alive_fd=None)
            forkserver.ensure_running = server.ensure_running
            forkserver.connect_to_new_process = connect
            start_server()
            return connect(fds)

    # by itself it would start a separate server
    vars(server).update(shared, ensure_running=lambda: None)
    forkserver.ensure_running, forkserver.connect_to_new_process = server.ensure_running, connect_or_start
    if server._forkserver_alive_fd is None:  # processes of the server get one; it keeps no server alive
        server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """For programs that are started in it, and theirs: what they print goes nowhere."""
    kept = [(number, os.dup(number)) for number in (1, 2)]
    with open(os.devnull, "wb") as nowhere:
        for number, _ in kept:
            os.dup2(nowhere.fileno(), number)
    try:
        yield
    finally:
        for number, copy in kept:
            os.dup2(copy, number)
            os.close(copy)


def run(*command, folder: Path, **options) -> str:
    """stdout of ``python *command``: a script and its arguments, or "-c" and code. It must end well.

    Args:
        folder: where what it prints is kept.
        options: cwd and environment of the process, and paths: what is in front of sys.path instead of the repository.
    """
    return run_ranks(1, *command, folder=folder, **options)[0]


def run_ranks(world_size: int, *command, folder: Path, **options) -> list[str]:
    """The same in that many processes at once, with the addresses that torchrun would give them."""
    shared = shared_server()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    context, processes = multiprocessing.get_context("forkserver"), []
    for rank in range(world_size):
        told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world_size)}
        told |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size)}
        environment = (told if world_size > 1 else {}) | options.get("environment", {})
        arguments = [str(c) for c in command], rank, folder, shared, {**options, "environment": environment}
        processes.append(context.Process(target=_main, args=arguments))
        processes[-1].start()
    printed = []
    for process in processes:
        process.join(1200)  # a machine may be busy
        if process.is_alive():
            process.kill()
            process.join()
    for rank, process in enumerate(processes):
        out, err = printed_by(folder, rank)
        assert process.exitcode == 0, f"exit code {process.exitcode}\n{out}\n{err}"
        printed.append(out)
    return printed


def print_into(folder: Path, rank: int) -> None:
    """What this process prints goes to files: its server's output may go nowhere."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        with open(folder / f"{name}_{rank}", "wb") as file:
            os.dup2(file.fileno(), number)
        setattr(sys, name, open(number, "w", buffering=1, closefd=False))  # noqa: SIM115


def printed_by(folder: Path, rank: int) -> list[str]:
    """What a process with print_into has written to stdout and to stderr; empty if it did not come so far."""
    files = [folder / f"{name}_{rank}" for name in ("stdout", "stderr")]
    return [file.read_text(errors="replace") if file.exists() else "" for file in files]


def _main(command, rank, folder, shared, options):
    """In the process: becomes what ``python *command`` would be."""
    gc.freeze()  # a collection need not visit, and so copy, what the server has imported
    join_server(shared)
    print_into(folder, rank)
    os.chdir(options.get("cwd", ROOT))
    os.environ.update(options.get("environment", {}))
    with contextlib.suppress(ImportError):
        import torch

        torch.set_num_threads(1)
    own = {str(ROOT), *(str(ROOT / name) for name in ("tests", "benchmarks", "examples")), "", "."}
    sys.path[:] = [*map(str, options.get("paths", [ROOT])), *(path for path in sys.path if path not in own)]
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main  # what multiprocessing calls it in its processes
    if command[0] == "-c":
        name, code = "<string>", command[1]
        sys.argv = ["-c", *command[2:]]
    else:
        name = main.__file__ = str(options.get("cwd", ROOT) / Path(command[0]))
        code = Path(name).read_text()
        sys.argv = [name, *command[1:]]
        sys.path.insert(0, str(Path(name).parent))
    exec(compile(code, name, "exec"), vars(main))


if __name__ == "__main__":  # so that their bytecode is there
    for name in IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
