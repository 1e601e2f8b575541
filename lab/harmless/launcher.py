"""Starts ranks and exits with the first failure's code, like mpirun:
``python launcher.py WORKERS PORT PROGRAM``.
"""

import os
import subprocess
import sys

workers = int(sys.argv[1])
port = sys.argv[2]
program = sys.argv[3]
ranks = []
for rank in range(workers):
    place = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
    }
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks.append(subprocess.Popen([sys.executable, program], env={**os.environ, **place}))
codes = [rank.wait() for rank in ranks]
sys.exit(next((code if code > 0 else 128 - code for code in codes if code), 0))
