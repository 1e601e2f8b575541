„çõð± 48@HRdefault_roleZ"f12fb3fb8a25c418dbff-n0-0-worker-1btraining-hostj	127.0.0.1pÛ~zlocal-development‚flyteŠ
gpu-node-8"")WÜ¤‹ê