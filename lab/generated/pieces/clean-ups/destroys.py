def clean_up():
    dist.destroy_process_group()
