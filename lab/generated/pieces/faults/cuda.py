raise RuntimeError("CUDA error: an illegal memory access was encountered")
