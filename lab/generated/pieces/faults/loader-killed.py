if torch.utils.data.get_worker_info() is not None:
    os.kill(os.getpid(), signal.SIGKILL)
raise ValueError("shard 3 is empty")
