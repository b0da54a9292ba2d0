"""One rank of a `tests.pool.Pool`: runs the functions that arrive over a pipe and sends their results back."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import importlib.util
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection

import cloudpickle
import torch
import torch.distributed as dist


def load(name: str, file: str | None) -> None:
    """Import a module from its file under the name that the test session uses, once."""
    if name in sys.modules or file is None:
        return
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python module: move the function that the pool runs into one")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def reset() -> None:
    """The state in which every run starts."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    gc.collect()
    gc.freeze()  # what is left are modules and caches: no later collection goes through them again
    torch.manual_seed(0)
    random.seed(0)


def answer(message: bytes) -> bytes:
    """Run one request; the reply is (kind, message, traceback, pickled value)."""
    try:
        (name, file), payload = pickle.loads(message)
        load(name, file)
        fn, args = pickle.loads(payload)
        reset()
        value = cloudpickle.dumps(fn(*args))
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        return pickle.dumps(("error", f"{type(error).__name__}: {error}", text, pickle.dumps(None)))
    return pickle.dumps(("result", "", "", value))


def follow(parent: int) -> None:
    """End this process when the test session is gone, even while a collective blocks the main thread."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def main(fd: int, rank: int, world: int, store: str) -> None:
    """Join the group, say so, then serve until the pipe closes."""
    threading.Thread(target=follow, args=(os.getppid(),), daemon=True).start()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.set_inheritable(fd, False)
    torch.set_num_threads(1)
    pipe = Connection(fd)
    limit = datetime.timedelta(minutes=20)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=limit)
    pipe.send_bytes(pickle.dumps(("result", "", "", pickle.dumps(None))))
    with contextlib.suppress(EOFError):
        while True:
            pipe.send_bytes(answer(pipe.recv_bytes()))
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
