"""`training` as a program of srun or mpirun, which tells torch its rank: ``rank_training.py FAULT [import]``."""

import os
import sys

if "import" in sys.argv:
    import firstfault_torch.record  # noqa: F401 - records what ends this process

for given, wanted in (
    ("SLURM_PROCID", "RANK"),
    ("SLURM_NTASKS", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "RANK"),
    ("OMPI_COMM_WORLD_SIZE", "WORLD_SIZE"),
):
    if given in os.environ:
        os.environ[wanted] = os.environ[given]

import training  # noqa: E402, F401 - trains
