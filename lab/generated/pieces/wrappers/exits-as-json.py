def main():
    try:
        train()
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        print(json.dumps({"level": "fatal", "error": repr(error)}), file=sys.stderr, flush=True)
        sys.exit(1)
