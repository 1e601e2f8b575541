def in_backward(step):
    weights = torch.ones(3, requires_grad=True)
    weights.register_hook(lambda gradient: meets(step, "hook"))
    (weights * 2).sum().backward()


def turn(step, batch=None):
    distract(step)
    time.sleep(0.05)
    if PLACE == "hook":
        in_backward(step)
    if not meets(step, "step"):
        communicate(step)
    meets(step, "after")
    checkpoint(step)
