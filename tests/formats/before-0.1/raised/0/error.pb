
¬
USER:RuntimeErrorãRuntimeError rank 3 ..74d44e68eb-n0-0-worker-1 no retry: mat1 and mat2 shapes cannot be...

root cause: RuntimeError, rank 3 on f06a28693174d44e68eb-n0-0-worker-1: mat1 and mat2 shapes cannot be multiplied (16x9 and 8x1)
retry: no, nothing says that another attempt would end differently (user_code: an exception of the training code without a more precise class)
enforced by Flyte: yes
category: user_code
node: f06a28693174d44e68eb-n0-0-worker-1
rank: 3 (local rank 1)
host: training-host
pid: 15063
time: 2026-11-23T02:26:52.238631758Z
confidence: high, by the strategy earliest
victims: 3
  rank 0: RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection c...
  rank 1: RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection c...
  rank 2: RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection c...
nodes heard: 2 of 2

Traceback (most recent call last):
  File "/srv/job/train.py", line 29, in train
    total = model(samples).mean().detach().reshape(1)
  File "/srv/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1778, in _wrapped_call_impl
    return self._call_impl(*args, **kwargs)
  File "/srv/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1789, in _call_impl
    return forward_call(*args, **kwargs)
  File "/srv/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py", line 134, in forward
    return F.linear(input, self.weight, self.bias)
RuntimeError: mat1 and mat2 shapes cannot be multiplied (16x9 and 8x1)

why: rank 3 on f06a28693174d44e68eb-n0-0-worker-1 failed first; the next, rank 2 on f06a28693174d44e68eb-n0-0-worker-1, was recorded 1234.0 ms later
more: firstfault show /srv/out/f06a28693174d44e68eb/0

RuntimeError rank 3 ..74d44e68eb-n0-0-worker-1 no retry: mat1 and mat2 shapes cannot be... *ìÈŽØÎöäq2"f06a28693174d44e68eb-n0-0-worker-1Ò>›1l-$Š‹ê 7f817c0639128e5fb65b144ef7d31ea2 *earliest2»{"schema":"firstfault.verdict/v1","verdict":{"scope":"rank","ranks":[3],"node":"f06a28693174d44e68eb-n0-0-worker-1","code":"USER:RuntimeError","category":"user_code","fingerprint":"1:3a903eb5dc29","headline":"RuntimeError, rank 3 on f06a28693174d44e68eb-n0-0-worker-1: mat1 and mat2 shapes cannot be multiplied (16x9 and 8x1)","message":"Traceback (most recent call last):\n  File \"/srv/job/train.py\", line 29, in train\n    total = model(samples).mean().detach().reshape(1)\n  File \"/srv/venv/lib/python3.11/site-packages/torch/nn/modules/module.py\", line 1778, in _wrapped_call_impl\n    return self._call_impl(*args, **kwargs)\n  File \"/srv/venv/lib/python3.11/site-packages/torch/nn/modules/module.py\", line 1789, in _call_impl\n    return forward_call(*args, **kwargs)\n  File \"/srv/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py\", line 134, in forward\n    return F.linear(input, self.weight, self.bias)\nRuntimeError: mat1 and mat2 shapes cannot be multiplied (16x9 and 8x1)","timestamp":"2026-11-23T02:26:52.238631758Z","strategy":"earliest","confidence":"high","why":["rank 3 on f06a28693174d44e68eb-n0-0-worker-1 failed first; the next, rank 2 on f06a28693174d44e68eb-n0-0-worker-1, was recorded 1234.0 ms later"],"suspects":[],"victims":{"count":3,"ranks":{"0":"RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:26522. T...","1":"RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:65214. T...","2":"RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:11153. T..."}},"coverage":{"expected":2,"reported":2,"unreadable":0,"complete":true,"notes":[]},"settled":true,"documents":{"digest":"7f817c0639128e5fb65b144ef7d31ea2","count":4}},"decision":{"retry":false,"kind":"NON_RECOVERABLE","origin":"USER","enforced":true,"reason":"nothing says that another attempt would end differently (user_code: an exception of the training code without a more precise class)"}}:"f06a28693174d44e68eb-n0-0-worker-1