
¯
USER:SIGKILLêSIGKILL rank 1 worker-0 no retry: killed by SIGKILL; no OOM kill was counted

root cause: SIGKILL, rank 1 on f12fb3fb8a25c418dbff-n0-0-worker-0: killed by SIGKILL; no OOM kill was counted
retry: no, nothing suggests that a retry would help (signal: a process was killed by a signal that its agent did not send)
enforced by Flyte: yes
fault: your code or infrastructure
category: signal
rank: 1 (local_rank 1)
pod: f12fb3fb8a25c418dbff-n0-0-worker-0
host: training-host
machine: gpu-node-8
exit code: -9 (pid 16255)
signal: SIGKILL: killed by SIGKILL; no OOM kill was counted
time: 2026-11-23T02:29:26.422077298Z
memory: peak 2.5 GiB, in use 2.2 GiB, oom_kill rose by 0
versions: flytekit 1.16.31, python 3.11.7, torch 2.13.0+cpu
victims: 2 lost a peer, 1 stopped by its agent; the first between 718 us earlier and 249 ms later; the last 122 ms to 372 ms later
  rank 0: RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection c...
  rank 2: RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection c...
  rank 3: stopped by its agent (SIGTERM): rank 1 on f12fb3fb8a25c418dbff-n0-0-worker-0 failed: SIGKILL
pods reported: 2 of 2
clocks: times are known to within 250 ms
confidence: high (strategy evidence)
unknown: which process sent SIGKILL: not its agent, and no OOM kill was counted
next: see what kills processes on its node: the node's events and the kernel's log

rank 1 (pid 16255) was killed by SIGKILL, which its agent did not send; exit code -9

why: rank 1 on f12fb3fb8a25c418dbff-n0-0-worker-0 was killed by SIGKILL, which its agent did not send
why: 3 others were stopped, or name a peer that was gone

to copy:
kubectl logs f12fb3fb8a25c418dbff-n0-0-worker-0 -n local-development
firstfault show /srv/out/f12fb3fb8a25c418dbff/0

SIGKILL rank 1 worker-0 no retry: killed by SIGKILL; no OOM kill was counted *†ÊŽØòÆ¡É2"f12fb3fb8a25c418dbff-n0-0-worker-0Ò>ŸÉNŠØª‹ê d8eb06230ade6a9eeef6f310ff1b075a *evidence2¿{"schema":"firstfault.verdict/v1","verdict":{"scope":"rank","ranks":[1],"node":"f12fb3fb8a25c418dbff-n0-0-worker-0","code":"USER:SIGKILL","category":"signal","fingerprint":"2:6b8a54c57cc8","headline":"SIGKILL, rank 1 on f12fb3fb8a25c418dbff-n0-0-worker-0: killed by SIGKILL; no OOM kill was counted","message":"rank 1 (pid 16255) was killed by SIGKILL, which its agent did not send; exit code -9","timestamp":"2026-11-23T02:29:26.422077298Z","strategy":"evidence","confidence":"high","why":["rank 1 on f12fb3fb8a25c418dbff-n0-0-worker-0 was killed by SIGKILL, which its agent did not send","3 others were stopped, or name a peer that was gone"],"suspects":[],"victims":{"count":3,"ranks":{"0":"RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:23704. T...","2":"RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:45720. T...","3":"stopped by its agent (SIGTERM): rank 1 on f12fb3fb8a25c418dbff-n0-0-worker-0 failed: SIGKILL"}},"coverage":{"expected":2,"reported":2,"unreadable":0,"complete":true,"notes":[]},"settled":true,"documents":{"digest":"d8eb06230ade6a9eeef6f310ff1b075a","count":5},"rule":""},"decision":{"retry":false,"kind":"NON_RECOVERABLE","origin":"USER","enforced":true,"reason":"nothing suggests that a retry would help (signal: a process was killed by a signal that its agent did not send)","retries_left":2}}:"f12fb3fb8a25c418dbff-n0-0-worker-0