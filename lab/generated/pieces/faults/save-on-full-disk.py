torch.save({"weights": torch.ones(1 << 18)}, "/dev/full")
