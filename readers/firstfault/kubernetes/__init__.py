"""``firstfault k8s``: manifests whose policies follow firstfault's decisions. Optional; nothing imports it."""
