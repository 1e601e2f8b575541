assert STEPS < 0, "the loss is not finite"
