raise RecoverableError("shard 7 is not there yet")
