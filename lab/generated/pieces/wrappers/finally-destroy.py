def main():
    try:
        train()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
