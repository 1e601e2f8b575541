raise ShardError("shard 17 is truncated")
