
î
USER:SIGKILLœ
SIGKILL rank 1 ..6e4459804b548df-n0-0-worker-0 no retry: rank 1 (pid 15927) was ended b...

root cause: SIGKILL, rank 1 on f99ab6e4459804b548df-n0-0-worker-0: rank 1 (pid 15927) was ended by SIGKILL, which its agent had not sent; exit code -9
retry: no, nothing says that another attempt would end differently (signal: a process was ended by a signal that its agent did not send)
enforced by Flyte: yes
category: signal
node: f99ab6e4459804b548df-n0-0-worker-0
rank: 1 (local rank 1)
host: training-host
exit code: -9 (SIGKILL)
pid: 15927
time: 2026-11-23T02:28:22.946327387Z
confidence: low, by the strategy earliest
victims: 3
  rank 0: RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection c...
  rank 2: RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [...
  rank 3: RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection c...
nodes heard: 2 of 2

rank 1 (pid 15927) was ended by SIGKILL, which its agent had not sent; exit code -9

why: rank 1 on f99ab6e4459804b548df-n0-0-worker-0 failed first; the next, rank 2 on f99ab6e4459804b548df-n0-0-worker-1, was recorded 1.3 ms later
more: firstfault show /srv/out/f99ab6e4459804b548df/0

SIGKILL rank 1 ..6e4459804b548df-n0-0-worker-0 no retry: rank 1 (pid 15927) was ended b... *∆…éÿ€ûü√2"f99ab6e4459804b548df-n0-0-worker-0“>Ÿl…˙ùãÍ fa0e042a5c2f5b586bbc5b8cb3ae03b1 *earliest2˘{"schema":"firstfault.verdict/v1","verdict":{"scope":"rank","ranks":[1],"node":"f99ab6e4459804b548df-n0-0-worker-0","code":"USER:SIGKILL","category":"signal","fingerprint":"1:6b8a54c57cc8","headline":"SIGKILL, rank 1 on f99ab6e4459804b548df-n0-0-worker-0: rank 1 (pid 15927) was ended by SIGKILL, which its agent had not sent; exit code -9","message":"rank 1 (pid 15927) was ended by SIGKILL, which its agent had not sent; exit code -9","timestamp":"2026-11-23T02:28:22.946327387Z","strategy":"earliest","confidence":"low","why":["rank 1 on f99ab6e4459804b548df-n0-0-worker-0 failed first; the next, rank 2 on f99ab6e4459804b548df-n0-0-worker-1, was recorded 1.3 ms later"],"suspects":[],"victims":{"count":3,"ranks":{"0":"RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:433. Thi...","2":"RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:433: Connection reset b...","3":"RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:23722. T..."}},"coverage":{"expected":2,"reported":2,"unreadable":0,"complete":true,"notes":[]},"settled":true,"documents":{"digest":"fa0e042a5c2f5b586bbc5b8cb3ae03b1","count":4}},"decision":{"retry":false,"kind":"NON_RECOVERABLE","origin":"USER","enforced":true,"reason":"nothing says that another attempt would end differently (signal: a process was ended by a signal that its agent did not send)"}}:"f99ab6e4459804b548df-n0-0-worker-0