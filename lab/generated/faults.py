"""The faults that a generated training may have, each with what a verdict has to say about it, and decoys."""

from dataclasses import dataclass
from typing import Any

_USER = ("user_code", "data", "numerics", "config", "checkpoint")


@dataclass(frozen=True, slots=True)
class Fault:
    """What a faulty rank does.

    `body` is the source of the function ``fault()``; LONG_S is longer than any training.
    """

    body: str
    said: tuple[str, ...]
    """The headline has one of these; empty: anything will do."""
    categories: tuple[str, ...]
    raises: bool = True
    """Whether it raises an exception, which wrappers may turn into something else."""
    has_code: bool = True
    """Whether the exception comes from the function itself."""
    scope: str = "rank"
    """"rank", or "node": the whole node is at fault."""
    hangs: bool = False
    in_loader: bool = True
    """Whether it may be met in a data set, a collate function or a hook: it does not need the group."""
    together: bool = True
    """Whether several ranks may have it at once."""
    retry: bool | None = False
    """Whether another attempt makes sense; None: both are right."""


def _raises(line: str, said: str, categories: tuple[str, ...] = _USER, *, retry: bool | None = False) -> Fault:
    return Fault(line, (said,), categories, retry=retry)


def _dies(body: str, said: str, categories: tuple[str, ...], **more: Any) -> Fault:
    """Return a fault that ends the process, or its agent, without an exception."""
    return Fault(body, (said,) if said else (), categories, **{"raises": False, "in_loader": False, **more})


def _hangs(body: str, said: str, categories: tuple[str, ...] = ("hang",), **more: Any) -> Fault:
    return _dies(body, said, categories, hangs=True, together=False, **more)


FAULTS: dict[str, Fault] = {
    "value": _raises('raise ValueError("batch 4 has no labels")', "batch 4 has no labels"),
    "key": _raises('{"weights": 1}["learning_rate"]', "learning_rate"),
    "assert": _raises('assert STEPS < 0, "the loss is not finite"', "the loss is not finite"),
    "own-class": _raises('raise ShardError("shard 17 is truncated")', "shard 17 is truncated"),
    "chained": _raises(
        "try:\n    int('seventeen')\nexcept ValueError as error:\n    raise RuntimeError('no index') from error",
        "seventeen",
    ),
    "missing-file": _raises('open("/no/such/shard-17.bin")', "shard-17", (*_USER, "storage")),
    "permission": _raises(
        'raise PermissionError(13, "Permission denied", "/checkpoints/step-3.pt")', "step-3.pt", (*_USER, "storage")
    ),
    "disk": _raises(
        'with open("/dev/full", "wb", buffering=0) as file:\n    file.write(b"weights")',
        "No space left on device",
        ("disk_full",),
    ),
    "save-on-full-disk": Fault(
        'torch.save({"weights": torch.ones(1 << 18)}, "/dev/full")',
        ("write", "iostream error", "unexpected pos"),
        ("disk_full", "storage", "checkpoint"),
    ),
    "cuda": _raises(
        'raise RuntimeError("CUDA error: an illegal memory access was encountered")', "illegal memory", ("gpu_kernel",)
    ),
    "cuda-memory": _raises(
        'raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of '
        '79.15 GiB of which 1.06 GiB is free.")',
        "out of memory",
        ("cuda_oom",),
    ),
    "memory-limit": Fault(
        "pages = int(open('/proc/self/statm').read().split()[0])\n"
        "limit = pages * resource.getpagesize() + (1 << 28)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "taken = [bytearray(1 << 24) for _ in range(1 << 10)]",
        ("MemoryError",),
        (*_USER, "host_oom"),
        in_loader=False,
        together=False,
    ),
    "recoverable": Fault(
        'raise RecoverableError("shard 7 is not there yet")', ("shard 7",), ("recoverable", *_USER), retry=None
    ),
    "loader-killed": Fault(
        "if torch.utils.data.get_worker_info() is not None:\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "raise ValueError('shard 3 is empty')",
        ("DataLoader worker", "shard 3 is empty"),
        (*_USER, "signal", "host_oom"),
        has_code=False,
    ),
    "recursion": _raises("fault()", "recursion"),
    "library": _raises("torch.ones(3) @ torch.ones(4)", "size"),
    "SIGKILL": _dies("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL", ("signal",)),
    "SIGSEGV": _dies("ctypes.string_at(0)", "SIGSEGV", ("signal",)),
    "abort": Fault("os.abort()", ("SIGABRT", "abort"), ("signal",), raises=False, in_loader=False),
    "device-assert": _dies(
        "os.write(2, b\"terminate called after throwing an instance of 'c10::Error'\\n\"\n"
        "    b'  what():  CUDA error: device-side assert triggered\\n')\n"
        "os.abort()",
        "device-side assert",
        ("gpu_kernel",),
    ),
    "off-the-bus": _dies(
        "os.write(2, b'NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\\n')\nos.abort()",
        "fallen off the bus",
        ("gpu_hardware",),
        retry=None,
    ),
    "hook-and-abort": _dies(
        "try:\n    raise ArithmeticError('the gradient of the head is not finite')\nexcept ArithmeticError:\n"
        "    traceback.print_exc()\n    sys.stderr.flush()\n    os.abort()",
        "gradient of the head",
        (*_USER, "signal"),
    ),
    "exit-with-word": Fault(
        'print("fatal: the license server does not answer", file=sys.stderr)\nsys.exit(7)',
        ("license server", "exit code 7", "SystemExit: 7"),
        ("exit", "external_service", "user_code", "network"),
        in_loader=False,
    ),
    "exit-silent": _dies("os._exit(3)", "exit code 3", ("exit",)),
    "printed-and-gone": _dies(
        "try:\n    {}['optimizer']\nexcept KeyError:\n    traceback.print_exc()\n    os._exit(1)",
        "optimizer",
        (*_USER, "exit"),
    ),
    "thread-ends-it": _dies(
        "def watch():\n    try:\n        raise LookupError('no heartbeat from the data server')\n"
        "    except LookupError:\n        logging.exception('giving up')\n        os._exit(1)\n"
        "threading.Thread(target=watch).start()\ntime.sleep(LONG_S)",
        "no heartbeat from the data server",
        (*_USER, "exit", "external_service", "storage", "network"),
    ),
    "hang-asleep": _hangs("time.sleep(LONG_S)", "in fault"),
    "hang-lock": _hangs("lock = threading.Lock()\nlock.acquire()\nlock.acquire()", "in fault"),
    "leaves": Fault(
        "sys.exit(0)", (), ("exit", "user_code", "unknown"), hangs=True, in_loader=False, together=False, retry=None
    ),
    "agent-killed": _dies(
        "time.sleep(1.5)\nos.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(LONG_S)",
        "",
        ("node_lost",),
        scope="node",
        together=False,
        retry=None,
    ),
    "agent-terminated": _dies(
        "time.sleep(1.5)\nos.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(LONG_S)",
        "",
        ("preemption",),
        scope="node",
        together=False,
        retry=None,
    ),
    "skips": _hangs("return True", ""),
    "mismatch": _hangs(
        "dist.all_reduce(torch.ones(7))", "", ("collective", "user_code", "signal", "hang", "unknown"), retry=None
    ),
}

DECOYS = {
    "handled": """
try:
    open("/no/such/cache")
except OSError:
    logging.exception("no cache, going on without")
""",
    "dead-helper": """
def report():
    raise ConnectionError("the metrics server is away")
threading.Thread(target=report, name="metrics").start()
""",
    "failing-child": """
subprocess.run([sys.executable, "-S", "-c", "raise SystemExit('no GPU here')"], check=False)
""",
    "cuda-words": """
logging.warning("CUDA error: out of memory; trying a smaller batch")
""",
    "warning": """
warnings.warn("this API will go away", FutureWarning)
""",
    "peer-words": """
logging.error("Connection closed by peer; connecting again to the metrics server")
""",
}
"""What a rank does that looks like a fault, and is none."""
