raise ValueError("batch 4 has no labels")
