import asyncio, atexit, concurrent.futures, contextlib, ctypes, datetime, logging, multiprocessing, os, queue, resource
import json, signal, subprocess, sys, threading, time, traceback, warnings
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from firstfault_torch import RecoverableError

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LONG_S = 60
logging.basicConfig(
    level=logging.INFO, format=f"%(asctime)s [rank {RANK}] %(levelname)s %(message)s"
)
torch.set_num_threads(1)
