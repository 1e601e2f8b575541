
÷
USER:RuntimeError­RuntimeError rank 3 worker-1 no retry: mat1 and mat2 shapes cannot be multiplied (16x9...

root cause: RuntimeError, rank 3 on f45ceef2bfe6541c08e1-n0-0-worker-1: mat1 and mat2 shapes cannot be multiplied (16x9 and 8x1)
retry: no, nothing suggests that a retry would help (user_code: an exception of the training code without a more precise class)
enforced by Flyte: yes
fault: failed (your code)
category: user_code
rank: 3 (local_rank 1)
pod: f45ceef2bfe6541c08e1-n0-0-worker-1
host: training-host
machine: gpu-node-8
pid: 18099
time: 2026-11-23T02:31:40.628975694Z
last collective: gloo:all_reduce #4, 4 completed (group default_pg)
versions: flytekit 1.16.31, python 3.11.7, torch 2.13.0+cpu
code: train.py:30 in train
victims: 3 stopped by their agents; the first 448 ms later; the last 627 ms later
  rank 0: stopped by its agent (SIGTERM): rank 3 on f45ceef2bfe6541c08e1-n0-0-worker-1 failed: RuntimeError
  rank 1: stopped by its agent (SIGTERM): rank 3 on f45ceef2bfe6541c08e1-n0-0-worker-1 failed: RuntimeError
  rank 2: stopped by its agent (SIGTERM): another worker of this node had failed
pods reported: 2 of 2
clocks: all processes use one clock
confidence: high (strategy evidence)
next: open the code that raised it: train.py:30 in train

in your code:
  train.py:30 in train: total = model(samples).mean().detach().reshape(1)

Traceback (most recent call last):
  File "/srv/job/train.py", line 30, in train
    total = model(samples).mean().detach().reshape(1)
  File "/srv/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1778, in _wrapped_call_impl
    return self._call_impl(*args, **kwargs)
  File "/srv/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1789, in _call_impl
    return forward_call(*args, **kwargs)
  File "/srv/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py", line 134, in forward
    return F.linear(input, self.weight, self.bias)
RuntimeError: mat1 and mat2 shapes cannot be multiplied (16x9 and 8x1)

why: rank 3 on f45ceef2bfe6541c08e1-n0-0-worker-1 raised an exception of its own
why: 3 others were stopped, or name a peer that was gone

to copy:
kubectl logs f45ceef2bfe6541c08e1-n0-0-worker-1 -n local-development
firstfault show /srv/out/f45ceef2bfe6541c08e1/0

RuntimeError rank 3 worker-1 no retry: mat1 and mat2 shapes cannot be multiplied (16x9... *ŒËŽØÎÐõ«2"f45ceef2bfe6541c08e1-n0-0-worker-1Ò>Š¤ÞfêË‹ê 6129c2fcd2621e6374ff2a75e444edde *evidence2ª{"schema":"firstfault.verdict/v1","verdict":{"scope":"rank","ranks":[3],"node":"f45ceef2bfe6541c08e1-n0-0-worker-1","code":"RuntimeError","category":"user_code","fingerprint":"2:3a903eb5dc29","headline":"RuntimeError, rank 3 on f45ceef2bfe6541c08e1-n0-0-worker-1: mat1 and mat2 shapes cannot be multiplied (16x9 and 8x1)","message":"Traceback (most recent call last):\n  File \"/srv/job/train.py\", line 30, in train\n    total = model(samples).mean().detach().reshape(1)\n  File \"/srv/venv/lib/python3.11/site-packages/torch/nn/modules/module.py\", line 1778, in _wrapped_call_impl\n    return self._call_impl(*args, **kwargs)\n  File \"/srv/venv/lib/python3.11/site-packages/torch/nn/modules/module.py\", line 1789, in _call_impl\n    return forward_call(*args, **kwargs)\n  File \"/srv/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py\", line 134, in forward\n    return F.linear(input, self.weight, self.bias)\nRuntimeError: mat1 and mat2 shapes cannot be multiplied (16x9 and 8x1)","timestamp":"2026-11-23T02:31:40.628975694Z","strategy":"evidence","confidence":"high","why":["rank 3 on f45ceef2bfe6541c08e1-n0-0-worker-1 raised an exception of its own","3 others were stopped, or name a peer that was gone"],"suspects":[],"victims":{"count":3,"ranks":{"0":"stopped by its agent (SIGTERM): rank 3 on f45ceef2bfe6541c08e1-n0-0-worker-1 failed: RuntimeError","1":"stopped by its agent (SIGTERM): rank 3 on f45ceef2bfe6541c08e1-n0-0-worker-1 failed: RuntimeError","2":"stopped by its agent (SIGTERM): another worker of this node had failed"}},"coverage":{"expected":2,"reported":2,"unreadable":0,"complete":true,"notes":[]},"settled":true,"documents":{"digest":"6129c2fcd2621e6374ff2a75e444edde","count":4},"rule":""},"decision":{"retry":false,"kind":"NON_RECOVERABLE","origin":"USER","enforced":true,"reason":"nothing suggests that a retry would help (user_code: an exception of the training code without a more precise class)","retries_left":2}}:"f45ceef2bfe6541c08e1-n0-0-worker-1