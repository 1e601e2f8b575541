"""``firstfault k8s``: manifests in which firstfault's exit codes decide on restarts. This
folder can be deleted.
"""
