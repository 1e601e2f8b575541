logging.warning("CUDA error: out of memory; trying a smaller batch")
