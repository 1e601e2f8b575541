"""Pieces of source from which a training is composed: loops, wrappers, communication, handlers, clean-ups, decoys."""

import textwrap

HEAD = """
import asyncio, atexit, concurrent.futures, contextlib, ctypes, datetime, logging, multiprocessing, os, queue, resource
import json, signal, subprocess, sys, threading, time, traceback, warnings
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from firstfault_torch import RecoverableError

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LONG_S = 60
logging.basicConfig(level=logging.INFO, format=f"%(asctime)s [rank {RANK}] %(levelname)s %(message)s")
torch.set_num_threads(1)
"""

COMMON = """
class TrainingError(Exception):
    pass


class ShardError(Exception):
    pass


def meets(step, place):
    # a retried step, or a loader that starts again, fails again
    if place == PLACE and step == FAULT_STEP and RANK in GUILTY:
        time.sleep(GUILTY[RANK])
        open(f"met-{RANK}", "w").close()
        return fault()


class Data(Dataset):
    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        meets(index, "data")
        return torch.full((4,), float(index))


def collate(samples):
    meets(int(samples[0][0]), "collate")
    return torch.stack(samples)


def loader():
    return DataLoader(Data(), batch_size=1, num_workers=LOADERS, collate_fn=collate)


def start():
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S))
    prepare()
    dist.barrier()


def finish():
    dist.barrier()
    clean_up()


def checkpoint(step):
    if step % 2 == FAULT_STEP % 2:
        if RANK == 0:
            meets(step, "checkpoint")
            time.sleep(0.02)
        dist.barrier()
"""

TURN = """
def in_backward(step):
    weights = torch.ones(3, requires_grad=True)
    weights.register_hook(lambda gradient: meets(step, "hook"))
    (weights * 2).sum().backward()


def turn(step, batch=None):
    distract(step)
    time.sleep(0.05)
    if PLACE == "hook":
        in_backward(step)
    if not meets(step, "step"):
        communicate(step)
    checkpoint(step)
"""

PLACES_OF = {
    "loader": ["data", "collate"],
    "iterator": ["data", "collate"],
    "trainer": ["data", "collate"],
    "prefetch": ["data", "thread"],
    "generator": ["data"],
    "async-save": ["save"],
}
"""Where a fault may be met besides a step, by loop."""


def trains(body: str) -> str:
    """Return a program's function `train`, which starts, does this, and finishes."""
    return f"\ndef train():\n    start()\n{textwrap.indent(body[1:], '    ')}    finish()\n"


LOOPS = {
    "plain": trains("""
for step in range(STEPS):
    turn(step)
"""),
    "loader": trains("""
for step, batch in enumerate(loader()):
    turn(step, batch)
"""),
    "iterator": trains("""
batches, step = iter(loader()), 0
while True:
    try:
        batch = next(batches)
    except StopIteration:
        break
    turn(step, batch)
    step += 1
"""),
    "generator": """
def batches():
    data = Data()
    try:
        for step in range(STEPS):
            yield data[step]
    finally:
        time.sleep(0.2)

"""
    + trains("""
for step, batch in enumerate(batches()):
    turn(step, batch)
"""),
    "with": """
class Session:
    def __enter__(self):
        start()
        return self

    def __exit__(self, *exc):
        time.sleep(0.3)  # sends its last metrics


def train():
    with Session():
        for step in range(STEPS):
            turn(step)
        finish()
""",
    "trainer": """
class EmergencySave:
    def on_exception(self, trainer, error):
        torch.save({"step": trainer.step}, "/dev/null" if RANK % 2 else f"emergency-{RANK}.pt")


class Metrics:
    def on_exception(self, trainer, error):
        time.sleep(0.1)
        logging.error("the run ends: %s", type(error).__name__)


class Trainer:
    callbacks = (EmergencySave(), Metrics())
    step = 0

    def fit(self, batches):
        try:
            start()
            for self.step, batch in enumerate(batches):
                self.training_step(batch)
            finish()
        except BaseException as error:
            for callback in self.callbacks:
                callback.on_exception(self, error)
            raise
        finally:
            self.teardown()

    def training_step(self, batch):
        turn(self.step, batch)

    def teardown(self):
        time.sleep(0.05)


def train():
    Trainer().fit(loader())
""",
    "full-disk-trainer": """
class Trainer:
    def fit(self):
        start()
        try:
            for step in range(STEPS):
                turn(step)
        except Exception:
            with open("/dev/full", "wb", buffering=0) as file:  # the emergency checkpoint does not fit
                file.write(b"weights")
            raise
        finish()


def train():
    Trainer().fit()
""",
    "prefetch": """
def fill(batches):
    data = Data()
    for step in range(STEPS):
        meets(step, "thread")
        batches.put(data[step])
    batches.put(None)

"""
    + trains("""
batches, step = queue.Queue(2), 0
threading.Thread(target=fill, args=(batches,), name="prefetch", daemon=True).start()
while (batch := batches.get()) is not None:
    turn(step, batch)
    step += 1
"""),
    "executor": trains("""
with concurrent.futures.ThreadPoolExecutor(1) as pool:
    for step in range(STEPS):
        pool.submit(turn, step).result()
"""),
    "async": """
async def steps():
    for step in range(STEPS):
        await asyncio.to_thread(turn, step)

"""
    + trains("""
asyncio.run(steps())
"""),
    "async-main": """
async def steps():
    for step in range(STEPS):
        turn(step)
        await asyncio.sleep(0)

"""
    + trains("""
asyncio.run(steps())
"""),
    "task-group": """
async def one(step):
    await asyncio.sleep(0)
    turn(step)


async def steps():
    for step in range(STEPS):
        async with asyncio.TaskGroup() as group:
            group.create_task(one(step))
            group.create_task(asyncio.sleep(0.01))

"""
    + trains("""
asyncio.run(steps())
"""),
    "pool": """
def double(number):
    return number * 2


def train():
    # torch's handler of SIGTERM, inherited by the pool's processes, may keep them from being terminated
    quiet = {"initializer": signal.signal, "initargs": (signal.SIGTERM, signal.SIG_DFL)}
    with multiprocessing.get_context("fork").Pool(2, **quiet) as pool:
        start()
        for step in range(STEPS):
            pool.map(double, range(3))
            turn(step)
        finish()
""",
    "async-save": """
def train():
    import torch.distributed.checkpoint as dcp

    class Writer(dcp.FileSystemWriter):
        def write_data(self, plan, planner):
            meets(saved, "save")
            return super().write_data(plan, planner)

    start()
    saved, saving, own = 0, None, dist.new_group()  # its collectives run beside those of the steps
    for step in range(STEPS):
        turn(step)
        if step == FAULT_STEP:
            saved = step
            state = {"weights": torch.ones(4) * step}
            saving = dcp.async_save(state, storage_writer=Writer("checkpoints"), process_group=own)
    if saving is not None:
        saving.result()
    finish()
""",
    "retried-steps": trains("""
for step in range(STEPS):
    for attempt in range(3):
        try:
            turn(step)
            break
        except Exception:
            logging.exception("step %d failed, attempt %d", step, attempt)
            if attempt == 2:
                raise
            time.sleep(0.1)
"""),
}


def _tries(handling: str) -> str:
    """Return a program's main function that handles exceptions of the training so."""
    return f"\ndef main():\n    try:\n        train()\n{textwrap.indent(handling[1:], '    ')}"


WRAPPERS = {
    "plain": """
def main():
    train()
""",
    "wrap-from": _tries("""
except Exception as error:
    raise TrainingError("training failed") from error
"""),
    "wrap-context": _tries("""
except Exception:
    raise TrainingError("training failed")
"""),
    "wrap-none": _tries("""
except Exception:
    raise TrainingError("training failed") from None
"""),
    "wrap-twice": """
def run():
    try:
        train()
    except Exception as error:
        raise RuntimeError("the run has failed") from error


def main():
    try:
        run()
    except Exception as error:
        raise TrainingError("training failed") from error
""",
    "group": _tries("""
except Exception as error:
    raise ExceptionGroup("training failed", [error])
"""),
    "group-cause": _tries("""
except Exception as error:
    raise TrainingError("training failed") from ExceptionGroup("one step failed", [error])
"""),
    "finally-destroy": _tries("""
finally:
    if dist.is_initialized():
        dist.destroy_process_group()
"""),
    "logged": _tries("""
except Exception:
    logging.exception("training failed")
    raise
"""),
    "exits": _tries("""
except Exception:
    traceback.print_exc()
    sys.exit(1)
"""),
    "exits-with-text": _tries("""
except Exception as error:
    sys.exit(f"training failed: {error}")
"""),
    "exits-hard": _tries("""
except Exception:
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)
"""),
    "retried": """
def main():
    for attempt in range(3):
        try:
            return train()
        except Exception:
            logging.exception("attempt %d failed", attempt)
            if attempt == 2:
                raise
            time.sleep(0.2)
""",
    "retried-anew": """
def main():
    for attempt in range(3):
        try:
            return train()
        except Exception as error:
            logging.warning("attempt %d failed: %s", attempt, error)
            last = error
            if dist.is_initialized():
                dist.destroy_process_group()
            time.sleep(0.1)
    raise RuntimeError("gave up after 3 attempts") from last
""",
    "context-manager": """
@contextlib.contextmanager
def closing():
    try:
        yield
    finally:
        time.sleep(0.2)
        if dist.is_initialized():
            dist.destroy_process_group()


def main():
    with closing():
        train()
""",
    "clean-up-fails": _tries("""
finally:
    os.remove("no-such-lock")
"""),
    "exits-with-word": _tries("""
except Exception as error:
    print(f"fatal: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(2)
"""),
    "exits-as-json": _tries("""
except BaseException as error:
    if isinstance(error, SystemExit):
        raise
    print(json.dumps({"level": "fatal", "error": repr(error)}), file=sys.stderr, flush=True)
    sys.exit(1)
"""),
    "thread": """
def main():
    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="training") as pool:
        pool.submit(train).result()
""",
}

_COMMUNICATIONS = {
    "all-reduce": """
def communicate(step):
    dist.all_reduce(torch.ones(3))
""",
    "ddp": """
MODEL = []


def prepare():
    model = torch.nn.Linear(4, 2)
    MODEL[:] = [DistributedDataParallel(model)]


def communicate(step):
    MODEL[0](torch.ones(2, 4)).sum().backward()
""",
    "subgroups": """
GROUPS = []


def prepare():
    pairs = [(0, 2), (1, 3)]
    made = [dist.new_group(pair) for pair in pairs]
    GROUPS[:] = [group for pair, group in zip(pairs, made) if RANK in pair]


def communicate(step):
    dist.all_reduce(torch.ones(3), group=GROUPS[0])
    if step % 2:
        dist.all_reduce(torch.ones(3))
""",
    "rank-0-works": """
def communicate(step):
    if RANK == 0:
        time.sleep(0.1)
    weights = torch.full((3,), float(step))
    dist.broadcast(weights, src=0)
    dist.all_reduce(weights)
""",
    "overlapped": """
def communicate(step):
    parts = [torch.ones(3) for _ in range(3)]
    works = [dist.all_reduce(part, async_op=True) for part in parts]
    time.sleep(0.02)
    for work in works:
        work.wait()
""",
    "objects": """
def communicate(step):
    found = [None] * WORLD
    dist.all_gather_object(found, {"rank": RANK, "step": step})
""",
    "monitored": """
def communicate(step):
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=TIMEOUT_S))
    dist.all_reduce(torch.ones(2))
""",
    "uneven": """
def communicate(step):
    time.sleep(0.04 * RANK)
    parts = [torch.zeros(2) for _ in range(WORLD)]
    dist.all_gather(parts, torch.full((2,), float(RANK)))
""",
    "pipeline": """
def communicate(step):
    part = torch.ones(2)
    if RANK > 0:
        dist.recv(part, src=RANK - 1)
    if RANK < WORLD - 1:
        dist.send(part, dst=RANK + 1)
    dist.barrier()
""",
}

COMMUNICATIONS = {
    name: text if "def prepare" in text else f"\ndef prepare():\n    pass\n\n{text}"
    for name, text in _COMMUNICATIONS.items()
}

HANDLERS = {
    "none": "",
    "raises": """
def stopped(number, frame):
    raise InterruptedError(f"stopped by signal {number}")


signal.signal(signal.SIGTERM, stopped)
""",
    "saves-and-exits": """
def stopped(number, frame):
    torch.save({"rank": RANK}, f"last-{RANK}.pt")
    sys.exit(0)


signal.signal(signal.SIGTERM, stopped)
""",
    "interrupts": """
signal.signal(signal.SIGTERM, signal.default_int_handler)
""",
    "ignores": """
signal.signal(signal.SIGTERM, lambda number, frame: logging.warning("signal %d is ignored", number))
""",
    "says-good-bye": """
atexit.register(lambda: print(f"rank {RANK} says good-bye", file=sys.stderr))
""",
}

CLEAN_UPS = {
    "destroys": """
def clean_up():
    dist.destroy_process_group()
""",
    "leaves": """
def clean_up():
    pass
""",
}
