…ÄŠö± 48@HRdefault_roleZ"f45ceef2bfe6541c08e1-n0-0-worker-1btraining-hostj	127.0.0.1pãŠzlocal-development‚flyteŠ
gpu-node-8"")”Ï¸‹ê