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
