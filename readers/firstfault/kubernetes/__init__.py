"""``firstfault k8s``: manifests whose policies follow firstfault's decisions. This folder can be deleted."""
