raise PermissionError(13, "Permission denied", "/checkpoints/step-3.pt")
