"""Error propagation for torch elastic, without flytekit: the agent, the workers, the recorder's client."""
