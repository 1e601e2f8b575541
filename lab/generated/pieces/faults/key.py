{"weights": 1}["learning_rate"]
