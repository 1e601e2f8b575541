warnings.warn("this API will go away", FutureWarning)
