def main():
    train()
