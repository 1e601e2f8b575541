def main():
    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="training") as pool:
        pool.submit(train).result()
