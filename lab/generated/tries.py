"""Shapes of trainings that try a step, or the training, again."""

from lab.generated.shapes import LOOPS, WRAPPERS, trains

TRIED_STEPS = {
    "retried-steps": LOOPS["retried-steps"],
    "backoff-steps": trains("""
for step in range(STEPS):
    for attempt in range(3):
        try:
            turn(step)
            break
        except Exception as error:
            print(f"step {step} failed: {error}", file=sys.stderr, flush=True)
            if attempt == 2:
                raise
            time.sleep(0.1 * 2**attempt)
"""),
    "printed-steps": trains("""
for step in range(STEPS):
    for attempt in range(3):
        try:
            turn(step)
            break
        except Exception:
            traceback.print_exc()
    else:
        raise TrainingError(f"step {step} failed 3 times")
"""),
    "decorated-steps": """
class RetryError(Exception):
    pass


def retrying(function):
    def tries(*args):
        for attempt in range(3):
            try:
                return function(*args)
            except Exception as error:
                last = error
                time.sleep(0.1)
        raise RetryError(f"{function.__name__} failed 3 times") from last

    return tries


turn = retrying(turn)

"""
    + LOOPS["plain"].lstrip("\n"),
}
"""Loops that try a step again."""

TRIED_TRAININGS = {
    "retried": WRAPPERS["retried"],
    "retried-anew": WRAPPERS["retried-anew"],
    "retried-rebuilt": """
def main():
    for attempt in range(3):
        try:
            return train()
        except Exception:
            traceback.print_exc()
            if dist.is_initialized():
                dist.destroy_process_group()
            if attempt == 2:
                raise
            time.sleep(0.1 * 2**attempt)
""",
    "retried-quietly": """
def once():
    try:
        train()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def main():
    for attempt in range(3):
        try:
            return once()
        except Exception as error:
            if attempt == 2:
                raise
            print(f"attempt {attempt} failed: {error!r}", file=sys.stderr, flush=True)
""",
    "retried-with-anything": """
def main():
    for attempt in range(3):
        try:
            return train()
        except:
            if attempt == 2:
                raise
            logging.error("attempt %d failed", attempt, exc_info=True)
            time.sleep(0.1)
""",
}
"""What tries the training again."""
