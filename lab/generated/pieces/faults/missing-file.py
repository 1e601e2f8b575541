open("/no/such/shard-17.bin")
